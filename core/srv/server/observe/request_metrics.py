"""Histograms and counters of requests: latencies, stages, token counts. One set per combination of custom labels.

Owns their names, buckets and labels. Must not know protocols, nor how a request's times are taken (`records`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from srv.args.groups.observe import ObserveArgs
from srv.server.observe import buckets
from srv.server.observe.metric_aliases import AliasLabels, TextAliases
from srv.server.observe.records import SequenceRecord
from srv.types import FinishReason

MAX_LABEL_SETS = 1000  # combinations of custom labels; what comes after that is counted as OTHER
OTHER = "other"
_PROMPT_TEXT, _GENERATED_TEXT = "Prompt tokens of a sequence.", "Tokens that a sequence returned."
_INTER_TOKEN, _PROMPT = "srv_inter_token_seconds", "srv_request_prompt_tokens"


class EndReason:
    """One reason in both counters, which have it under different labels."""

    __slots__ = ("_counters",)

    def __init__(self, *counters: Counter) -> None:
        self._counters = counters

    def inc(self) -> None:
        for counter in self._counters:
            counter.inc()


class RequestMetrics:
    """What one combination of custom labels counts."""

    __slots__ = ("_finished", "_histograms", "_inter_token", "_structured", "_tokens", "_ttft")

    def __init__(
        self,
        histograms: Mapping[str, Histogram],
        finished: Mapping[FinishReason, EndReason],
        structured: Mapping[bool, Counter],
        tokens: Sequence[Histogram],
    ) -> None:
        """`tokens`: of a sequence, in its prompt and generated."""
        self._histograms, self._finished, self._structured = histograms, finished, structured
        self._tokens = tokens
        self._ttft, self._inter_token = histograms["srv_time_to_first_token_seconds"], histograms[_INTER_TOKEN]

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` arrived together, `seconds` after the previous ones."""
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def structured_output_ended(self, valid: bool) -> None:
        """An output with a grammar has ended. valid: it follows the grammar; one cut off by its length does not."""
        self._structured[valid].inc()

    def ended(self, record: SequenceRecord) -> None:
        """A sequence has ended, for whatever reason."""
        histograms = self._histograms
        self._finished[record.reason].inc()
        histograms["srv_request_seconds"].observe(record.ended - record.arrival)
        if record.output_index == 0:
            histograms["srv_request_outputs"].observe(record.outputs)
        if record.max_tokens is not None:
            histograms["srv_request_max_tokens"].observe(record.max_tokens)
        for stage, (begin, end) in record.stages().items():
            histograms[f"srv_{stage}_seconds"].observe(max(0.0, end - begin))
        if record.scheduled is not None:
            histograms["srv_inference_seconds"].observe(max(0.0, record.ended - record.scheduled))
        if record.completion_tokens > 1 and record.first_token is not None:
            seconds = (record.ended - record.first_token) / (record.completion_tokens - 1)
            histograms["srv_request_time_per_token_seconds"].observe(max(0.0, seconds))
        for tokens, histogram in zip((record.prompt_tokens, record.completion_tokens), self._tokens, strict=True):
            histogram.observe(tokens)
        if _PROMPT in histograms:
            histograms[_PROMPT].observe(record.prompt_tokens)
            histograms["srv_request_uncached_prompt_tokens"].observe(record.prompt_tokens - record.cached_tokens)
            histograms["srv_request_generated_tokens"].observe(record.completion_tokens)


class NoRequestMetrics(RequestMetrics):
    """Without --enable-metrics nothing is counted."""

    __slots__ = ()

    def __init__(self) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def next_tokens(self, seconds: float, tokens: int) -> None: ...

    def structured_output_ended(self, valid: bool) -> None: ...

    def ended(self, record: SequenceRecord) -> None: ...


class RequestMetricsFamilies:
    """The families of one server. `max_tokens`: the most tokens of a request, for the buckets of token limits."""

    def __init__(self, registry: CollectorRegistry, observe: ObserveArgs, labels: AliasLabels, max_tokens: int) -> None:
        self._registry, self.aliases = registry, TextAliases(labels)
        self._custom = observe.tokenizer_metrics_allowed_custom_labels or ()
        self._histograms: dict[str, Histogram] = {}
        self._add_latencies(observe)
        outputs, limits = buckets.OUTPUTS, buckets.one_two_five(max_tokens)
        self._add("srv_request_outputs", "Outputs per prompt (n).", outputs, "vllm:request_params_n")
        self._add(
            "srv_request_max_tokens",
            "Most tokens that a request may generate.",
            limits,
            "vllm:request_params_max_tokens",
        )
        prompt = buckets.token_buckets(observe.prompt_tokens_buckets)
        generated = buckets.token_buckets(observe.generation_tokens_buckets)
        if observe.collect_tokens_histogram:
            self._add_token_counts(prompt, generated)
        self._finished = Counter(
            "srv_sequences", "Sequences that ended, by reason.", ["finish_reason", *self._custom], registry=registry
        )
        self._structured = Counter(
            "srv_structured_outputs",
            "Outputs with a grammar that ended, by whether they follow it.",
            ["valid", *self._custom],
            registry=registry,
        )
        constant = labels.of("vllm:")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            [*constant, "finished_reason", *self._custom],
            registry=registry,
        )
        self._tokens = [
            Histogram(name, text, [*constant, *self._custom], buckets=bounds, registry=registry)
            for name, text, bounds in (
                ("vllm:request_prompt_tokens", _PROMPT_TEXT, prompt),
                ("vllm:request_generation_tokens", _GENERATED_TEXT, generated),
            )
        ]
        self._constant = tuple(constant.values())
        self._made: dict[tuple[str, ...], RequestMetrics] = {}
        self.of(("",) * len(self._custom))  # every reason is exported from the start

    def _add_latencies(self, observe: ObserveArgs) -> None:
        ttft = observe.bucket_time_to_first_token or buckets.TTFT
        inter_token = observe.bucket_inter_token_latency or buckets.INTER_TOKEN
        whole = observe.bucket_e2e_request_latency or buckets.REQUEST
        self._add(
            "srv_time_to_first_token_seconds",
            "Time from the arrival of a request to the first token of a sequence.",
            ttft,
            "vllm:time_to_first_token_seconds",
            "sglang:time_to_first_token_seconds",
        )
        self._add(
            _INTER_TOKEN,
            "Time between tokens of one sequence.",
            inter_token,
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
            "sglang:inter_token_latency_seconds",
        )
        self._add(
            "srv_request_time_per_token_seconds",
            "Mean time per token of a sequence after its first one.",
            inter_token,
            "vllm:request_time_per_output_token_seconds",
        )
        self._add(
            "srv_request_seconds",
            "Time from the arrival of a request to the end of a sequence.",
            whole,
            "vllm:e2e_request_latency_seconds",
            "sglang:e2e_request_latency_seconds",
        )
        self._add_stages(whole)

    def of(self, labels: Sequence[str] = ()) -> RequestMetrics:
        """The metrics for these values of the custom labels; () stands for empty ones."""
        values = tuple(labels) or ("",) * len(self._custom)
        if (metrics := self._made.get(values)) is not None:
            return metrics
        if len(self._made) >= MAX_LABEL_SETS:
            values = (OTHER,) * len(self._custom)
            if (metrics := self._made.get(values)) is not None:
                return metrics
        histograms = {
            name: histogram.labels(*values) if self._custom else histogram
            for name, histogram in self._histograms.items()
        }
        finished = {reason: self._ended(reason, values) for reason in FinishReason}
        structured = {valid: self._structured.labels(str(valid).lower(), *values) for valid in (True, False)}
        tokens = [counter.labels(*self._constant, *values) for counter in self._tokens]
        metrics = self._made[values] = RequestMetrics(histograms, finished, structured, tokens)
        return metrics

    def _ended(self, reason: FinishReason, custom: Sequence[str]) -> EndReason:
        labels, alias = (reason.value, *custom), (*self._constant, reason.value, *custom)
        return EndReason(self._finished.labels(*labels), self._success.labels(*alias))

    def _add_stages(self, bounds: Sequence[float]) -> None:
        for stage, text in (
            ("queue", "Time from the arrival of a request until the scheduler gave it a slot."),
            ("prefill", "Time from the slot to the first token."),
            ("decode", "Time from the first token to the end of a sequence."),
            ("inference", "Time from the slot to the end of a sequence."),
        ):
            further = ("sglang:queue_time_seconds",) if stage == "queue" else ()
            self._add(f"srv_{stage}_seconds", text, bounds, f"vllm:request_{stage}_time_seconds", *further)
            if stage != "inference":
                self.aliases.add(f"srv_{stage}_seconds", "sglang:per_stage_req_latency_seconds", stage=stage)

    def _add_token_counts(self, prompt: Sequence[float], generated: Sequence[float]) -> None:
        self._add(_PROMPT, _PROMPT_TEXT, prompt, "sglang:prompt_tokens_histogram")
        self._add(
            "srv_request_uncached_prompt_tokens",
            "Prompt tokens of a sequence that were not in the prefix cache.",
            prompt,
            "sglang:uncached_prompt_tokens_histogram",
        )
        self._add(
            "srv_request_generated_tokens",
            _GENERATED_TEXT,
            generated,
            "vllm:request_max_num_generation_tokens",
            "sglang:generation_tokens_histogram",
        )

    def _add(self, name: str, text: str, bounds: Sequence[float], *aliases: str) -> None:
        histogram = Histogram(name, text, self._custom, buckets=bounds, registry=self._registry)
        self._histograms[name] = histogram
        self.aliases.add(name, *aliases)

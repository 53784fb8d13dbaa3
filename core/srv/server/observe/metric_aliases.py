"""The metrics of `srv` under the names and labels that the dashboards of vLLM and SGLang query.

Owns these names. Each value is one that `srv.server.observe.metrics` exports under a name of its own, too; what `srv`
does not measure has no name here. Must not know how a value is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from srv.io.messages import Stats

# (names, help): gauges and counters of `Stats`; a counter's name gets the suffix _total.
_RUNNING = (("vllm:num_requests_running", "sglang:num_running_reqs"), "Sequences in the running batch.")
_WAITING = (("vllm:num_requests_waiting", "sglang:num_queue_reqs"), "Sequences in the waiting queue.")
_USAGE = (
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "sglang:full_token_usage"),
    "Share of the KV pool that running requests use, 0 to 1.",
)
_USED = (("sglang:num_used_tokens", "sglang:kv_used_tokens"), "Positions of the KV pool that running requests use.")
_AVAILABLE = (("sglang:kv_available_tokens",), "Free positions of the KV pool.")
_EVICTABLE = (("sglang:kv_evictable_tokens",), "Positions of the KV pool that only the prefix cache holds.")
_HIT_RATE = (("sglang:cache_hit_rate",), "Share of prompt tokens found in the prefix cache.")
_THROUGHPUT = (("sglang:gen_throughput",), "Tokens generated per second since the previous scrape.")
_ACCEPT_RATE = (("sglang:spec_accept_rate",), "Share of draft tokens that were accepted.")
_COUNTERS = (
    (("vllm:prompt_tokens", "sglang:prompt_tokens", "vllm:prefix_cache_queries"), "Prompt tokens.", "prompt_tokens"),
    (("vllm:prefix_cache_hits",), "Prompt tokens found in the prefix cache.", "cached_tokens"),
    (("vllm:generation_tokens", "sglang:generation_tokens"), "Tokens generated.", "generated_tokens"),
    (("vllm:num_preemptions", "sglang:num_retracted_requests"), "Sequences retracted to the queue.", "retractions"),
    (("sglang:num_requests",), "Sequences that the engine finished.", "finished"),
    (("sglang:num_aborted_requests",), "Sequences that the engine aborted.", "aborted"),
    (("vllm:spec_decode_num_draft_tokens",), "Draft tokens that were verified.", "drafts_proposed"),
    (("vllm:spec_decode_num_accepted_tokens",), "Draft tokens that were accepted.", "drafts_accepted"),
)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """tokens_per_page: positions of a request that a page of the pool holds, over all cache groups."""

    pages: int = 0
    page_size: int = 1
    groups: int = 1

    @property
    def tokens_per_page(self) -> float:
        return self.page_size / self.groups


class AliasLabels:
    """The constant labels of each server's metrics, by the prefix of the metric's name."""

    def __init__(self, model: str) -> None:
        self._labels: dict[str, Mapping[str, str]] = {
            "vllm": {"model_name": model, "engine": "0"},
            "sglang": {"model_name": model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"},
        }

    def of(self, name: str) -> Mapping[str, str]:
        return self._labels[name.partition(":")[0]]


class TextAliases:
    """Repeats families of the text exposition format under further names, with the labels of those.

    It works on the text, because formatting every sample once more is what a scrape would spend most of its time on.
    """

    def __init__(self, labels: AliasLabels) -> None:
        self._labels = labels
        self._aliases: dict[str, list[tuple[str, str]]] = {}  # (name, its constant labels) by the name of a family

    def add(self, family: str, *names: str, **labels: str) -> None:
        """`family`: a histogram, or a counter with its suffix. more: further constant labels."""
        for name in names:
            constant = ",".join(
                f'{key}="{_escaped(value)}"' for key, value in {**self._labels.of(name), **labels}.items()
            )
            self._aliases.setdefault(family, []).append((name, constant))

    def of(self, text: str) -> str:
        """The lines of all aliases of the families in `text`."""
        lines: dict[str, list[str]] = {}
        family, aliases = "", []
        for line in text.splitlines():
            if line.startswith("# "):
                kind, family = line.split(" ", 3)[1:3]
                aliases = self._aliases.get(family, [])
                for name, _ in aliases:
                    begun = lines.setdefault(name, [])
                    if not any(begun_line.startswith(f"# {kind} ") for begun_line in begun[:2]):
                        begun.append(line.replace(family, name, 1))
                continue
            for name, constant in aliases:
                rest = line[len(family) :]
                suffix, brace, labels_and_value = rest.partition("{")
                if brace:
                    lines[name].append(f"{name}{suffix}{{{constant},{labels_and_value}")
                else:
                    suffix, _, value = rest.partition(" ")
                    lines[name].append(f"{name}{suffix}{{{constant}}} {value}")
        return "".join(f"{line}\n" for family_lines in lines.values() for line in family_lines)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class StatsAliases:
    """The families of one `Stats`."""

    def __init__(self, labels: AliasLabels, pool: PoolShape) -> None:
        self._labels, self._pool = labels, pool

    def families(self, stats: Stats, throughput: float | None) -> Iterator[Metric]:
        per_page = self._pool.tokens_per_page
        gauges: list[tuple[tuple[tuple[str, ...], str], float]] = [
            (_RUNNING, stats.running),
            (_WAITING, stats.waiting),
            (_USAGE, stats.pages_held / stats.pages_total if stats.pages_total else 0.0),
            (_USED, stats.pages_held * per_page),
            (_AVAILABLE, stats.pages_free * per_page),
            (_EVICTABLE, stats.pages_cached * per_page),
            (_HIT_RATE, stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0),
        ]
        if throughput is not None:
            gauges.append((_THROUGHPUT, throughput))
        if stats.drafts_proposed:
            gauges.append((_ACCEPT_RATE, stats.drafts_accepted / stats.drafts_proposed))
        for (names, text), value in gauges:
            for name in names:
                yield self._one(GaugeMetricFamily(name, text, labels=list(self._labels.of(name))), name, value)
        for names, text, attribute in _COUNTERS:
            for name in names:
                family = CounterMetricFamily(name, text, labels=list(self._labels.of(name)))
                yield self._one(family, name, getattr(stats, attribute))
        yield self._cached(stats)
        yield self._config()

    def _one(
        self, family: GaugeMetricFamily | CounterMetricFamily, name: str, value: float
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family.add_metric(list(self._labels.of(name).values()), value)
        return family

    def _cached(self, stats: Stats) -> Metric:
        """SGLang's counter names where the tokens came from; `srv` has only the cache on the device."""
        constant = self._labels.of("sglang:")
        family = CounterMetricFamily(
            "sglang:cached_tokens",
            "Prompt tokens found in the prefix cache, by source.",
            labels=[*constant, "cache_source"],
        )
        for source in ("device", "total"):
            family.add_metric([*constant.values(), source], stats.cached_tokens)
        return family

    def _config(self) -> Metric:
        constant = self._labels.of("vllm:")
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool.", labels=[*constant, "block_size", "num_blocks"]
        )
        family.add_metric([*constant.values(), str(self._pool.page_size), str(self._pool.pages)], 1)
        return family

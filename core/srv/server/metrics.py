"""Prometheus metrics of the API process and of the engine.

Owns names, help texts and buckets. Must not know protocols; the metrics of the engine arrive as `Stats`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from srv.io.messages import Stats
from srv.types import FinishReason

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)

_GAUGES = (
    ("srv_requests_running", "Sequences in the running batch.", "running"),
    ("srv_requests_queued", "Sequences in the waiting queue.", "waiting"),
    ("srv_kv_pages_total", "Pages of the KV pool.", "pages_total"),
    ("srv_kv_pages_free", "Free pages of the KV pool.", "pages_free"),
    ("srv_kv_pages_cached", "Pages of the prefix cache that no running request uses.", "pages_cached"),
    ("srv_kv_pages_held", "Pages that running requests use.", "pages_held"),
)
_COUNTERS = (
    ("srv_prompt_tokens", "Prompt tokens received.", "prompt_tokens"),
    ("srv_cached_tokens", "Prompt tokens found in the prefix cache.", "cached_tokens"),
    ("srv_generated_tokens", "Tokens generated.", "generated_tokens"),
    ("srv_drafts_proposed", "Draft tokens that were verified.", "drafts_proposed"),
    ("srv_drafts_accepted", "Draft tokens that were accepted.", "drafts_accepted"),
    ("srv_engine_steps", "Engine steps.", "steps"),
    ("srv_replayed_steps", "Engine steps that replayed a captured graph.", "replayed_steps"),
    ("srv_eager_steps", "Engine steps that ran eagerly.", "eager_steps"),
    ("srv_retractions", "Sequences retracted to the queue because the KV pool was full.", "retractions"),
    ("srv_sequences_finished", "Sequences that the engine finished.", "finished"),
    ("srv_sequences_aborted", "Sequences that the engine aborted.", "aborted"),
)


class _EngineStats(Collector):
    """Exports the last `Stats` at each scrape."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, text, attribute in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, attribute))
        for name, text, attribute in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, attribute))
        ratio = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield GaugeMetricFamily("srv_cache_hit_ratio", "Share of prompt tokens found in the prefix cache.", value=ratio)


class Metrics:
    """The metrics of one server, with their own registry, so that one process can run several servers."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineStats()
        self.registry.register(self._engine)
        info = Gauge("srv_model_info", "The served model.", ["model"], registry=self.registry)
        info.labels(model_name).set(1)
        self._up = Gauge("srv_engine_up", "1 while the engine process runs.", registry=self.registry)
        self._ttft = Histogram(
            "srv_time_to_first_token_seconds",
            "Time from the arrival of a request to the first token of a sequence.",
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "srv_inter_token_seconds",
            "Time between tokens of one sequence.",
            buckets=INTER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._request = Histogram(
            "srv_request_seconds",
            "Time from the arrival of a request to the end of a sequence.",
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._finished = Counter(
            "srv_sequences", "Sequences that ended, by reason.", ["finish_reason"], registry=self.registry
        )
        for reason in FinishReason:
            self._finished.labels(reason.value)
        self._http = Counter("srv_http_responses", "HTTP responses, by status.", ["status"], registry=self.registry)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` arrived together, `seconds` after the previous ones."""
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def sequence_ended(self, reason: FinishReason, seconds: float) -> None:
        self._finished.labels(reason.value).inc()
        self._request.observe(seconds)

    def responded(self, status: int) -> None:
        self._http.labels(str(status)).inc()

    def expose(self, stats: Stats | None, alive: bool) -> bytes:
        """The text exposition format, version 0.0.4."""
        self._engine.stats = stats if alive else None  # the last report of a dead engine is outdated
        self._up.set(1 if alive else 0)
        return generate_latest(self.registry)

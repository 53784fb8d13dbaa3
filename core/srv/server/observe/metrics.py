"""Prometheus metrics of the API process and of the engine.

Owns names, help texts and buckets. Must not know protocols; the metrics of the engine arrive as `Stats`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from srv.args.groups.observe import ObserveArgs
from srv.commands import ExpertLoad
from srv.io.memory_lines import MemoryLine
from srv.io.messages import Stats
from srv.io.phases import Phase
from srv.io.step_tokens import BOUNDS
from srv.platform.sensors import Reading
from srv.server.observe.metric_aliases import AliasLabels, PoolShape, StatsAliases
from srv.server.observe.request_metrics import NoRequestMetrics, RequestMetrics, RequestMetricsFamilies

MIN_RATE_SECONDS = 0.5  # rates of two scrapes that follow each other faster are those of the earlier one

_GAUGES = (
    ("srv_requests_running", "Sequences in the running batch.", "running"),
    ("srv_requests_queued", "Sequences in the waiting queue.", "waiting"),
    ("srv_kv_pages_total", "Pages of the KV pool.", "pages_total"),
    ("srv_kv_pages_free", "Free pages of the KV pool.", "pages_free"),
    ("srv_kv_pages_cached", "Pages of the prefix cache that no running request uses.", "pages_cached"),
    ("srv_kv_pages_held", "Pages that running requests use.", "pages_held"),
    ("srv_state_slots_total", "Slots for recurrent states of prefixes.", "state_slots_total"),
    ("srv_state_slots_cached", "Slots with recurrent states of the prefix cache.", "state_slots_cached"),
    ("srv_state_slots_held", "Slots for recurrent states that running requests hold.", "state_slots_held"),
)
_COUNTERS = (
    ("srv_prompt_tokens", "Prompt tokens received.", "prompt_tokens"),
    ("srv_cached_tokens", "Prompt tokens found in the prefix cache.", "cached_tokens"),
    ("srv_generated_tokens", "Tokens generated.", "generated_tokens"),
    ("srv_drafts_proposed", "Draft tokens that were verified.", "drafts_proposed"),
    ("srv_drafts_accepted", "Draft tokens that were accepted.", "drafts_accepted"),
    ("srv_engine_steps", "Engine steps.", "steps"),
    ("srv_replayed_steps", "Engine steps that replayed a captured graph, or pieces of one.", "replayed_steps"),
    ("srv_piecewise_steps", "Engine steps that replayed pieces of a graph.", "piecewise_steps"),
    ("srv_compiled_steps", "Engine steps that ran the compiled function.", "compiled_steps"),
    ("srv_eager_steps", "Engine steps that ran eagerly.", "eager_steps"),
    ("srv_overlapped_steps", "Engine steps that were planned while another one ran.", "overlapped_steps"),
    ("srv_retractions", "Sequences retracted to the queue because the KV pool was full.", "retractions"),
    ("srv_sequences_finished", "Sequences that the engine finished.", "finished"),
    ("srv_sequences_aborted", "Sequences that the engine aborted.", "aborted"),
)
STEP_TOKENS = "srv_step_tokens"
_DEVICE = ("device", "name")  # the labels of a device
_LAYER = ("layer",)
_DEVICE_GAUGES = (
    ("srv_device_utilization_ratio", "Share of the last period in which the device computed.", "utilization"),
    ("srv_device_temperature_celsius", "Temperature of the device.", "temperature"),
    ("srv_device_power_watts", "Power that the device draws.", "power"),
    ("srv_device_memory_used_bytes", "Memory of the device that all processes use.", "memory_used"),
    ("srv_device_memory_total_bytes", "Memory of the device.", "memory_total"),
)


class _EngineStats(Collector):
    """Exports the last `Stats` at each scrape. slow_paths: see `ServerSettings`."""

    def __init__(self, slow_paths: Mapping[str, str], aliases: StatsAliases) -> None:
        self.stats: Stats | None = None
        self._slow_paths, self._aliases = slow_paths, aliases
        self._throughput: float | None = None
        self._counted: tuple[float, int] | None = None  # when the rate was computed last, and the tokens until then

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, text, attribute in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, attribute))
        for name, text, attribute in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, attribute))
        yield self._slow_steps(stats)
        if stats.step_tokens:
            yield self._step_tokens(stats)
        ratio = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield GaugeMetricFamily("srv_cache_hit_ratio", "Share of prompt tokens found in the prefix cache.", value=ratio)
        inert = GaugeMetricFamily(
            "srv_feature_inert", "1 for a feature that is switched on and has had no effect.", labels=["feature"]
        )
        for name in stats.inert:
            inert.add_metric([name], 1)
        yield inert
        yield from self._aliases.families(stats, self._rate(stats.generated_tokens))

    def _rate(self, tokens: int) -> float | None:
        """Tokens per second since the last scrape but those just before; None at the first one."""
        now = time.monotonic()
        if self._counted is None or tokens < self._counted[1]:
            self._counted, self._throughput = (now, tokens), None
        elif now - self._counted[0] >= MIN_RATE_SECONDS:
            before, counted = self._counted
            self._throughput, self._counted = (tokens - counted) / (now - before), (now, tokens)
        return self._throughput

    def _step_tokens(self, stats: Stats) -> Metric:
        cumulative = accumulate(stats.step_tokens)
        bounds = [str(float(bound)) for bound in BOUNDS]
        text = "Tokens that an engine step computed, of prompts and outputs, drafts included."
        family = HistogramMetricFamily(STEP_TOKENS, text)
        family.add_metric([], list(zip([*bounds, "+Inf"], cumulative, strict=True)), stats.computed_tokens)
        return family

    def _slow_steps(self, stats: Stats) -> Metric:
        """Of a part of every step, all steps; of steps that no graph covers, those of each reason."""
        counter = CounterMetricFamily(
            "srv_slow_path_steps",
            "Engine steps in which a slower path computed this part, by reason.",
            labels=("path", "reason"),
        )
        for path, reason in self._slow_paths.items():
            counter.add_metric([path, reason], stats.steps)
        for reason, steps in sorted(stats.slow_steps.items()):
            counter.add_metric(["graphs", reason], steps)
        return counter


class _DeviceReadings(Collector):
    """Exports the devices' sensors, as they were read for this scrape."""

    def __init__(self) -> None:
        self.devices: Sequence[Reading] = ()

    def collect(self) -> Iterator[Metric]:
        if not self.devices:
            return
        for name, text, attribute in _DEVICE_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_DEVICE)
            for device in self.devices:
                value = getattr(device, attribute)
                if value is not None:
                    gauge.add_metric([device.device, device.name], value)
            if gauge.samples:
                yield gauge
        throttled = GaugeMetricFamily(
            "srv_device_throttled", "1 while the device lowers its clock for this reason.", labels=[*_DEVICE, "reason"]
        )
        for device in self.devices:
            for reason, active in device.throttle.items():
                throttled.add_metric([device.device, device.name, reason], float(active))
        if throttled.samples:
            yield throttled


class _ExpertLoads(Collector):
    """Exports the load of experts that was read last: rate(mean) / rate(busiest) is 1 where all are used equally."""

    def __init__(self) -> None:
        self.load: ExpertLoad | None = None

    def collect(self) -> Iterator[Metric]:
        if self.load is None:
            return
        text = "added up over engine steps, by layer."
        mean = CounterMetricFamily(
            "srv_expert_tokens_mean", f"Mean number of tokens of an expert, {text}", labels=_LAYER
        )
        busiest = CounterMetricFamily(
            "srv_expert_tokens_busiest", f"Tokens of the expert that gets most in a step, {text}", labels=_LAYER
        )
        for layer, one, most in zip(self.load.layers, self.load.mean, self.load.busiest, strict=True):
            mean.add_metric([str(layer)], one)
            busiest.add_metric([str(layer)], most)
        yield from (mean, busiest)


class _Ledgers(Collector):
    """Exports the memory ledger and the start-up ledger."""

    def __init__(
        self, memory: Sequence[Sequence[MemoryLine]], startup: Callable[[], Mapping[str, Sequence[Phase]]]
    ) -> None:
        self._memory, self._startup = memory, startup

    def collect(self) -> Iterator[Metric]:
        text = "Memory of a rank by line of its ledger, as predicted and as measured after the start."
        memory = GaugeMetricFamily("srv_memory_ledger_bytes", text, labels=["rank", "line", "figure"])
        for rank, lines in enumerate(self._memory):
            for line in lines:
                for figure, value in (("predicted", line.predicted), ("measured", line.measured)):
                    if value is not None:
                        memory.add_metric([str(rank), line.name, figure], value)
        seconds = GaugeMetricFamily("srv_start_seconds", "Phases of the start.", labels=["process", "phase"])
        for process, phases in self._startup().items():
            for phase in phases:
                seconds.add_metric([process, phase.name], phase.seconds)
        yield from (family for family in (memory, seconds) if family.samples)


class Metrics:
    """The metrics of one server, with their own registry, so that one process can run several servers."""

    def __init__(
        self,
        model_name: str,
        slow_paths: Mapping[str, str] = MappingProxyType({}),
        memory: Sequence[Sequence[MemoryLine]] = (),
        startup: Callable[[], Mapping[str, Sequence[Phase]]] = dict,
        observe: ObserveArgs = ObserveArgs(),  # noqa: B008 - immutable
        pool: PoolShape = PoolShape(),  # noqa: B008 - immutable
        max_tokens: int = 1,
    ) -> None:
        self.enabled = observe.enable_metrics
        self.registry = CollectorRegistry()
        labels = AliasLabels(model_name)
        self._engine = _EngineStats(slow_paths, StatsAliases(labels, pool))
        self._devices = _DeviceReadings()
        self.registry.register(self._engine)
        self.registry.register(self._devices)
        self._experts = _ExpertLoads()
        self.registry.register(self._experts)
        self.registry.register(_Ledgers(memory, startup))
        info = Gauge("srv_model_info", "The served model.", ["model"], registry=self.registry)
        info.labels(model_name).set(1)
        self._up = Gauge("srv_engine_up", "1 while the engine process runs.", registry=self.registry)
        self._requests = RequestMetricsFamilies(self.registry, observe, labels, max_tokens)
        self._requests.aliases.add(STEP_TOKENS, "vllm:iteration_tokens_total")
        self._none = NoRequestMetrics()
        self._http = Counter("srv_http_responses", "HTTP responses, by status.", ["status"], registry=self.registry)

    def of(self, labels: Sequence[str] = ()) -> RequestMetrics:
        """What a request with these values of the custom labels counts; nothing without --enable-metrics."""
        return self._requests.of(labels) if self.enabled else self._none

    def responded(self, status: int) -> None:
        self._http.labels(str(status)).inc()

    def expose(
        self, stats: Stats | None, alive: bool, devices: Sequence[Reading] = (), experts: ExpertLoad | None = None
    ) -> bytes:
        """The text exposition format, version 0.0.4. devices: what their sensors report now.

        experts: their load; None: it could not be read, and the last one is exposed again.
        """
        self._devices.devices = devices
        self._experts.load = (experts or self._experts.load) if alive else None
        self._engine.stats = stats if alive else None  # the last report of a dead engine is outdated
        self._up.set(1 if alive else 0)
        text = generate_latest(self.registry).decode()
        return (text + self._requests.aliases.of(text)).encode()

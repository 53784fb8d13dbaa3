"""`srv top`: what a server does, in a terminal, from the metrics that it serves over HTTP.

    running 12   queued 3   pool 41 %   cache hits 30 %   812 tokens/s   first token 0.21 s   each with its history
    failures: 2 aborted, 1 answer of 500        slow paths: graphs, no graph of 40 rows: 12 % of steps

It reads the names of srv, vLLM or SGLang, whichever the server has. Must not know how a server counts.
"""

from __future__ import annotations

import argparse
import gc
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from srv.cli.text import printable
from srv.errors import SrvError

if TYPE_CHECKING:
    from rich.console import RenderableType

HISTORY = 60  # samples
_BARS = "▁▂▃▄▅▆▇█"
_TIMEOUT_S = 10.0

# The metrics that have a quantity, the first that is there counts.
_RUNNING = ("srv_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_QUEUED = ("srv_requests_queued", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PROMPT = ("srv_prompt_tokens_total", "vllm:prefix_cache_queries_total", "sglang:prompt_tokens_total")
_CACHED = ("srv_cached_tokens_total", "vllm:prefix_cache_hits_total")
_HIT_RATE = ("srv_cache_hit_ratio", "sglang:cache_hit_rate")
_GENERATED = ("srv_generated_tokens_total", "vllm:generation_tokens_total", "sglang:generation_tokens_total")
# Histograms: the mean of the requests or tokens since the last reading is shown.
_FIRST_TOKEN = (
    "srv_time_to_first_token_seconds",
    "vllm:time_to_first_token_seconds",
    "sglang:time_to_first_token_seconds",
)
_BETWEEN_TOKENS = (
    "srv_inter_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "sglang:inter_token_latency_seconds",
)
_ABORTED = ("srv_sequences_aborted_total", "sglang:num_aborted_requests_total")
_RESPONSES, _SLOW_STEPS, _STEPS = "srv_http_responses_total", "srv_slow_path_steps_total", "srv_engine_steps_total"
_SERVER_ERROR = 500
_FINISHED = ("srv_sequences_finished_total", "vllm:request_success_total", "sglang:num_requests_total")


class TopError(SrvError):
    """The server has no metrics that can be shown."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"{url} cannot be watched: {reason}. Pass the address of a running server with --url. [no_metrics]"
        )


class Total(NamedTuple):
    """A histogram so far: the sum in seconds, and how many there were."""

    seconds: float = 0.0
    number: float = 0.0

    def mean_since(self, before: Total) -> float | None:
        """The mean of those that came since; None if there are none."""
        number = self.number - before.number
        return (self.seconds - before.seconds) / number if number > 0 else None


class TopSample(NamedTuple):
    """One reading. Rates are per second since the previous one, None at the first. `usage`, `hit_rate`: 0 to 1.

    `first_token`, `between_tokens`: mean seconds since the previous reading, at the first since the start.
    `failures`: how many of each kind since the start. `slow_paths`: the share of steps, by what was slow and why.
    """

    at: float
    running: float
    queued: float
    usage: float | None
    pages: tuple[float, float] | None  # held, total
    hit_rate: float | None
    generated: float
    prompt: float
    finished: float
    generation_rate: float | None = None
    prompt_rate: float | None = None
    first_tokens: Total = Total()
    tokens: Total = Total()
    first_token: float | None = None
    between_tokens: float | None = None
    failures: Mapping[str, float] = MappingProxyType({})
    slow_paths: Mapping[str, float] = MappingProxyType({})


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch a server",
        description="Show what a server does: running and queued requests, the KV pool, prefix cache hits, tokens per"
        " second and latency, with their history, and what failed or was slow. Works with every server that has the"
        " metrics of srv, vLLM or SGLang.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", help="key that the server requires for /metrics")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between readings (default: %(default)s)")
    parser.add_argument("--count", type=int, help="end after so many readings, and print only the last one")
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    gc.enable()  # it runs long
    url, interval = namespace.url.rstrip("/"), max(0.1, namespace.interval)
    watch = Watch(lambda: fetch(url, namespace.api_key))
    console = Console()
    watch.read()
    if namespace.count is not None:
        for _ in range(namespace.count - 1):
            time.sleep(interval)
            watch.read()
        console.print(watch.render(url))
        return 0
    with Live(watch.render(url), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            watch.read()
            live.update(watch.render(url), refresh=True)


class Watch:
    """The readings so far. fetch: returns the text of /metrics."""

    def __init__(self, fetch: Callable[[], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch, self._clock = fetch, clock
        self.samples: deque[TopSample] = deque(maxlen=HISTORY)

    def read(self) -> TopSample:
        sample = sample_of(parse(self._fetch()), self._clock())
        before = self.samples[-1] if self.samples else None
        goes_on = before is not None and sample.generated >= before.generated  # else, the server was started again
        if before is not None and goes_on and (seconds := sample.at - before.at) > 0:
            sample = sample._replace(
                generation_rate=(sample.generated - before.generated) / seconds,
                prompt_rate=(sample.prompt - before.prompt) / seconds,
            )
        first_tokens, tokens = (before.first_tokens, before.tokens) if before and goes_on else (Total(), Total())
        sample = sample._replace(
            first_token=sample.first_tokens.mean_since(first_tokens), between_tokens=sample.tokens.mean_since(tokens)
        )
        self.samples.append(sample)
        return sample

    def render(self, url: str) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, expand=True, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="bold")
        table.add_column(no_wrap=True, style="cyan")
        last = self.samples[-1]
        pages = f" ({last.pages[0]:.0f} of {last.pages[1]:.0f} pages)" if last.pages is not None else ""
        rows: tuple[tuple[str, str, Sequence[float | None]], ...] = (
            ("running", f"{last.running:.0f}", [sample.running for sample in self.samples]),
            ("queued", f"{last.queued:.0f}", [sample.queued for sample in self.samples]),
            ("KV pool", _percent(last.usage) + pages, [sample.usage for sample in self.samples]),
            ("cache hits", _percent(last.hit_rate), [sample.hit_rate for sample in self.samples]),
            ("tokens/s", _rate(last.generation_rate), [sample.generation_rate for sample in self.samples]),
            ("prompt tokens/s", _rate(last.prompt_rate), [sample.prompt_rate for sample in self.samples]),
            ("first token", _seconds(last.first_token), [sample.first_token for sample in self.samples]),
            ("between tokens", _seconds(last.between_tokens), [sample.between_tokens for sample in self.samples]),
            ("finished", f"{last.finished:.0f}", []),
        )
        for label, shown, values in rows:
            table.add_row(label, shown, history(values))
        failures = ", ".join(f"{count:.0f} {kind}" for kind, count in last.failures.items() if count) or "none"
        shares = sorted(last.slow_paths.items(), key=lambda share: -share[1])
        slow = [Text(f"  {what}: {100 * share:.0f} % of steps") for what, share in shares if share > 0]
        below = [Text(f"failures: {failures}"), Text("slow paths:" if slow else "slow paths: none"), *slow]
        return Panel(Group(table, *below), title=f"srv top  {url}", expand=True)


def fetch(url: str, key: str | None = None) -> str:
    """The text of /metrics. Raises TopError."""
    request = urllib.request.Request(f"{url}/metrics")
    if key is not None:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            text: str = response.read().decode()
            return text
    except urllib.error.HTTPError as error:
        raise TopError(url, f"GET /metrics returned {error.code}") from error
    except (OSError, ValueError) as error:
        raise TopError(url, str(getattr(error, "reason", error))) from error


class TopMetrics(NamedTuple):
    """The samples of a server by name: those of each set of labels, and the sum of each name over them."""

    labelled: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
    sums: Mapping[str, float]

    def first(self, names: Sequence[str]) -> float | None:
        return next((self.sums[name] for name in names if name in self.sums), None)

    def total(self, names: Sequence[str]) -> Total:
        """The first of these histograms that is there."""
        family = next((name for name in names if f"{name}_count" in self.sums), None)
        return Total() if family is None else Total(self.sums.get(f"{family}_sum", 0.0), self.sums[f"{family}_count"])


def parse(text: str) -> TopMetrics:
    """Raises TopError if the text is not of Prometheus' format."""
    from prometheus_client.parser import text_string_to_metric_families

    labelled: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labelled.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise TopError("the server", f"its /metrics cannot be read ({error})") from error
    return TopMetrics(labelled, {name: sum(value for _, value in samples) for name, samples in labelled.items()})


def sample_of(metrics: TopMetrics, at: float) -> TopSample:
    """A reading. Raises TopError if the server has none of the metrics."""
    running = metrics.first(_RUNNING)
    if running is None:
        raise TopError("the server", "its /metrics has no metrics of srv, vLLM or SGLang")
    pages = None
    usage, total = metrics.first(_USAGE), metrics.sums.get("srv_kv_pages_total")
    if total:
        pages = metrics.sums.get("srv_kv_pages_held", 0.0), total
        usage = pages[0] / total
    prompt, cached, hit_rate = metrics.first(_PROMPT), metrics.first(_CACHED), metrics.first(_HIT_RATE)
    if hit_rate is None and cached is not None and prompt:
        hit_rate = cached / prompt
    return TopSample(
        at,
        running,
        metrics.first(_QUEUED) or 0.0,
        usage,
        pages,
        hit_rate,
        metrics.first(_GENERATED) or 0.0,
        prompt or 0.0,
        metrics.first(_FINISHED) or 0.0,
        first_tokens=metrics.total(_FIRST_TOKEN),
        tokens=metrics.total(_BETWEEN_TOKENS),
        failures=_failures(metrics),
        slow_paths=_slow_paths(metrics),
    )


def _failures(metrics: TopMetrics) -> Mapping[str, float]:
    """Aborted sequences, and answers of each status that says that the server failed."""
    failures = {"aborted": metrics.first(_ABORTED) or 0.0}
    for labels, count in metrics.labelled.get(_RESPONSES, ()):
        status = labels.get("status", "")
        if status.isdecimal() and int(status) >= _SERVER_ERROR:
            failures[f"answers of {status}"] = count
    return failures


def _slow_paths(metrics: TopMetrics) -> Mapping[str, float]:
    """The share of all steps in which a slower path computed a part, by the part and the reason."""
    steps = metrics.sums.get(_STEPS, 0.0)
    samples = metrics.labelled.get(_SLOW_STEPS, ())
    return {
        printable(f"{labels.get('path')}, {labels.get('reason')}"): count / steps for labels, count in samples if steps
    }


def history(values: Sequence[float | None]) -> str:
    """One bar per value, from 0 to the largest one."""
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return _BARS[0] * len(values)
    steps = len(_BARS) - 1
    return "".join(" " if value is None else _BARS[round(steps * max(0.0, value) / most)] for value in values)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _rate(value: float | None) -> str:
    return "..." if value is None else f"{value:.1f}"


def _seconds(value: float | None) -> str:
    return "..." if value is None else f"{value:.3f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"

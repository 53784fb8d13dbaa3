"""`srv top`: what a server does, in a terminal, from the metrics that it serves over HTTP.

    running 12   queued 3   pool 41 %   cache hits 30 %   812 tokens/s        each with its history

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
from typing import TYPE_CHECKING, NamedTuple

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
_FINISHED = ("srv_sequences_finished_total", "vllm:request_success_total", "sglang:num_requests_total")


class TopError(SrvError):
    """The server has no metrics that can be shown."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"{url} cannot be watched: {reason}. Pass the address of a running server with --url. [no_metrics]"
        )


class Sample(NamedTuple):
    """One reading. Rates are per second since the previous one, None at the first. `usage`, `hit_rate`: 0 to 1."""

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


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch a server",
        description="Show what a server does: running and queued requests, the KV pool, prefix cache hits and tokens"
        " per second, with their history. Works with every server that has the metrics of srv, vLLM or SGLang.",
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
        self.samples: deque[Sample] = deque(maxlen=HISTORY)

    def read(self) -> Sample:
        sample = sample_of(parse(self._fetch()), self._clock())
        if self.samples:
            before = self.samples[-1]
            seconds = sample.at - before.at
            if seconds > 0 and sample.generated >= before.generated:  # else, the server was started again
                sample = sample._replace(
                    generation_rate=(sample.generated - before.generated) / seconds,
                    prompt_rate=(sample.prompt - before.prompt) / seconds,
                )
        self.samples.append(sample)
        return sample

    def render(self, url: str) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table

        table = Table(box=None, expand=True, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="bold")
        table.add_column(no_wrap=True, style="cyan")
        last = self.samples[-1]
        pages = f" ({last.pages[0]:.0f} of {last.pages[1]:.0f} pages)" if last.pages is not None else ""
        rows: tuple[tuple[str, str, Sequence[float | None]], ...] = (
            ("running", f"{last.running:.0f}", [each.running for each in self.samples]),
            ("queued", f"{last.queued:.0f}", [each.queued for each in self.samples]),
            ("KV pool", _percent(last.usage) + pages, [each.usage for each in self.samples]),
            ("cache hits", _percent(last.hit_rate), [each.hit_rate for each in self.samples]),
            ("tokens/s", _rate(last.generation_rate), [each.generation_rate for each in self.samples]),
            ("prompt tokens/s", _rate(last.prompt_rate), [each.prompt_rate for each in self.samples]),
            ("finished", f"{last.finished:.0f}", []),
        )
        for label, shown, values in rows:
            table.add_row(label, shown, history(values))
        return Panel(table, title=f"srv top  {url}", expand=True)


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


def parse(text: str) -> dict[str, float]:
    """The sum of the samples of each metric, over its labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition("{")
        value = rest.rpartition("}")[2] if rest else ""
        if not rest:
            name, _, value = line.partition(" ")
        try:
            sums[name] = sums.get(name, 0.0) + float(value.split()[0])
        except (ValueError, IndexError):
            continue
    return sums


def sample_of(metrics: Mapping[str, float], at: float) -> Sample:
    """A reading. Raises TopError if the server has none of the metrics."""
    running = _first(metrics, _RUNNING)
    if running is None:
        raise TopError("the server", "its /metrics has no metrics of srv, vLLM or SGLang")
    pages = None
    usage, total = _first(metrics, _USAGE), metrics.get("srv_kv_pages_total")
    if total:
        pages = metrics.get("srv_kv_pages_held", 0.0), total
        usage = pages[0] / total
    prompt, cached, hit_rate = _first(metrics, _PROMPT), _first(metrics, _CACHED), _first(metrics, _HIT_RATE)
    if hit_rate is None and cached is not None and prompt:
        hit_rate = cached / prompt
    return Sample(
        at,
        running,
        _first(metrics, _QUEUED) or 0.0,
        usage,
        pages,
        hit_rate,
        _first(metrics, _GENERATED) or 0.0,
        prompt or 0.0,
        _first(metrics, _FINISHED) or 0.0,
    )


def history(values: Sequence[float | None]) -> str:
    """One bar per value, from 0 to the largest one."""
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return _BARS[0] * len(values)
    steps = len(_BARS) - 1
    return "".join(" " if value is None else _BARS[round(steps * max(0.0, value) / most)] for value in values)


def _first(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"


def _rate(value: float | None) -> str:
    return "..." if value is None else f"{value:.1f}"

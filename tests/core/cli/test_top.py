"""`srv top` reads the metrics of three servers, and computes rates from successive readings."""

from __future__ import annotations

import pytest
from rich.console import Console

from srv.cli.top import TopError, Watch, history

OURS = """# HELP srv_requests_running x
srv_requests_running 2.0
srv_requests_queued 1.0
srv_kv_pages_total 200.0
srv_kv_pages_held 50.0
srv_cache_hit_ratio 0.25
srv_generated_tokens_total {tokens}
srv_sequences_finished_total 7.0
"""
VLLM = """vllm:num_requests_running{{engine="0",model_name="a {{b}} c"}} 2.0
vllm:num_requests_running{{engine="1",model_name="a"}} 1.0
vllm:num_requests_waiting{{engine="0"}} 4.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:prefix_cache_queries_total{{engine="0"}} 100.0
vllm:prefix_cache_hits_total{{engine="0"}} 40.0
vllm:generation_tokens_total{{engine="0"}} {tokens}
"""
SGLANG = """sglang:num_running_reqs{{model_name="a"}} 2.0
sglang:num_queue_reqs{{model_name="a"}} 0.0
sglang:token_usage{{model_name="a"}} 0.5
sglang:cache_hit_rate{{model_name="a"}} 0.1
sglang:generation_tokens_total{{model_name="a"}} {tokens}
"""


@pytest.mark.parametrize(
    ("text", "running", "queued", "usage", "hits"),
    [(OURS, 2, 1, 0.25, 0.25), (VLLM, 3, 4, 0.5, 0.4), (SGLANG, 2, 0, 0.5, 0.1)],
)
def test_three_servers(text: str, running: int, queued: int, usage: float, hits: float) -> None:
    readings, times = iter((10, 110, 5)), iter((1.0, 3.0, 4.0))
    watch = Watch(lambda: text.format(tokens=float(next(readings))), lambda: next(times))
    first = watch.read()
    assert (first.running, first.queued, first.usage, first.hit_rate) == (running, queued, usage, hits)
    assert first.generation_rate is None
    assert watch.read().generation_rate == 50
    assert watch.read().generation_rate is None  # the server was started again
    console = Console(width=100)
    with console.capture() as captured:
        console.print(watch.render("http://a"))
    shown = captured.get()
    assert f"{running}" in shown
    assert f"{100 * usage:.1f} %" in shown


def test_a_server_without_such_metrics_is_refused() -> None:
    with pytest.raises(TopError, match="no metrics of srv, vLLM or SGLang"):
        Watch(lambda: "process_cpu_seconds_total 3").read()


def test_history() -> None:
    assert history([0, 7, 14, None]) == "▁▅█ "
    assert history([0, 0]) == "▁▁"
    assert history([]) == ""

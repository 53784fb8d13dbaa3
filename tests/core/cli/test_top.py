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
srv_sequences_aborted_total 3.0
srv_http_responses_total{{status="200"}} 9.0
srv_http_responses_total{{status="404"}} 8.0
srv_http_responses_total{{status="500"}} 2.0
srv_engine_steps_total 200.0
srv_slow_path_steps_total{{path="graphs",reason="40 rows, more than the largest graph"}} 50.0
srv_slow_path_steps_total{{path="sampling",reason="never"}} 0.0
srv_time_to_first_token_seconds_sum {seconds}
srv_time_to_first_token_seconds_count {tokens}
srv_inter_token_seconds_sum {seconds}
srv_inter_token_seconds_count{{a="b"}} {tokens}
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
    watch = Watch(lambda: text.format(tokens=float(next(readings)), seconds=1.0), lambda: next(times))
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


def test_latency_is_that_since_the_last_reading() -> None:
    readings = iter(((10.0, 2.0), (30.0, 3.0), (30.0, 3.0), (5.0, 1.0)))  # how many, and their seconds
    watch = Watch(lambda: (lambda tokens, seconds: OURS.format(tokens=tokens, seconds=seconds))(*next(readings)))
    actual = [watch.read() for _ in range(4)]
    assert [sample.first_token for sample in actual] == [0.2, 0.05, None, 0.2]  # at last, the server was started again
    assert [sample.between_tokens for sample in actual] == [0.2, 0.05, None, 0.2]


def test_failures_and_slow_paths_are_shown() -> None:
    watch = Watch(lambda: OURS.format(tokens=10.0, seconds=0.5))
    assert watch.read().failures == {"aborted": 3, "answers of 500": 2}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(watch.render("http://a"))
    shown = captured.get()
    assert "failures: 3 aborted, 2 answers of 500" in shown
    assert "graphs, 40 rows, more than the largest graph: 25 % of steps" in shown
    assert "never" not in shown
    assert "50.0 ms" in shown


def test_what_is_no_text_of_metrics_is_refused() -> None:
    with pytest.raises(TopError, match="cannot be read"):
        Watch(lambda: "<html> {{{ nothing").read()


def test_a_server_without_such_metrics_is_refused() -> None:
    with pytest.raises(TopError, match="no metrics of srv, vLLM or SGLang"):
        Watch(lambda: "process_cpu_seconds_total 3").read()


def test_history() -> None:
    assert history([0, 7, 14, None]) == "▁▅█ "
    assert history([0, 0]) == "▁▁"
    assert history([]) == ""

"""What a server shows of itself: every argument of the group observe has an effect that a user sees.

Three servers of a very small model with dummy weights: `plain` has the defaults, `watched` asks for everything, and
sends traces to a collector in a process of its own; `quiet` counts nothing and logs little.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_support import Server, free_port, launch, launched, served, srv_command, wait_until
from engine_small import make_small
from letters_model import CONTEXT
from otlp_collector import Collector, collector
from prometheus_client.parser import text_string_to_metric_families

from srv.planning.expert_location import LayerExpertCounts, Mixtures, read_location
from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN = "an admin key"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BOARD = Path(__file__).parents[2] / "docs" / "grafana" / "srv.json"
METRIC = re.compile(r"\b(?:srv_|vllm:|sglang:)[a-z0-9_]+")


@pytest.fixture(scope="module")
def common(letters_model: Path, srv_device: str) -> tuple[str, ...]:
    pool = ("--max-running-requests", "2", "--max-total-tokens", str(2 * CONTEXT))
    return ("--device", srv_device, "--model-path", str(letters_model), "--load-format", "dummy", *pool)


@pytest.fixture(scope="module")
def plain(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with launched(tmp_path_factory.mktemp("plain") / "log", *common) as server:
        complete(server)
        yield server


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("collector") / "spans") as running:
        yield running


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps") / "here"


@pytest.fixture(scope="module")
def watched(
    common: tuple[str, ...], traces: Collector, dumps: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = (
        *("--enable-trace", "--oltp-traces-endpoint", traces.grpc, "--crash-dump-folder", str(dumps)),
        *("--log-requests", "--log-requests-level", "3", "--enable-request-time-stats-logging"),
        *("--log-level-http", "info", "--admin-api-key", ADMIN, "--collect-tokens-histogram"),
        *("--prompt-tokens-buckets", "custom", "2", "4", "--generation-tokens-buckets", "tse", "8", "2", "2"),
        *("--bucket-time-to-first-token", "1", "--bucket-inter-token-latency", "1"),
        *("--bucket-e2e-request-latency", "1"),
        *("--tokenizer-metrics-allowed-custom-labels", "team", "--tokenizer-metrics-custom-labels-header", "x-labels"),
        *("--gc-warning-threshold-secs", "0.000000001", "--decode-log-interval", "1", "--show-time-cost"),
    )
    with launched(tmp_path_factory.mktemp("watched") / "log", *common, *arguments) as server:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-labels": '{"team": "search"}'}
        complete(server, headers, prompt="a b c", max_tokens=12)
        yield server


@pytest.fixture(scope="module")
def quiet(common: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = ("--log-level", "warning", "--log-requests", "--log-requests-level", "0", "--log-level-http", "error")
    with launched(tmp_path_factory.mktemp("quiet") / "log", *common, "--no-enable-metrics", *log) as server:
        complete(server)
        yield server


def complete(server: Server, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "a b", "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
    with server.client(headers=headers or {}) as client:
        return client.post("/v1/completions", json=body).raise_for_status()


def bounds(server: Server, name: str) -> list[str]:
    """The bucket bounds of a histogram."""
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    if name not in families:
        return []
    edges = [sample.labels["le"] for sample in families[name].samples if sample.name.endswith("_bucket")]
    return list(dict.fromkeys(edges))


def lines(server: Server, part: str) -> list[str]:
    return [line for line in server.log_text().splitlines() if part in line]


def logged(server: Server, event: str) -> list[dict[str, Any]]:
    """The JSON of the request log's lines for this event."""
    return [json.loads(line.partition(f"{event} request ")[2]) for line in lines(server, f"{event} request {{")]


@covers("enable_metrics=true", "enable_metrics=false")
def test_metrics_can_be_switched_off(plain: Server, quiet: Server) -> None:
    shown = plain.metrics()
    assert shown['vllm:request_success_total{engine="0",finished_reason="length",model_name="letters"}'] == 1
    assert (
        shown[
            'sglang:time_to_first_token_seconds_count{model_name="letters",engine_type="unified",tp_rank="0",'
            'pp_rank="0"}'
        ]
        == shown["srv_time_to_first_token_seconds_count"]
        == 1
    )
    assert (
        shown["srv_queue_seconds_count"] == shown["srv_prefill_seconds_count"] == shown["srv_decode_seconds_count"] == 1
    )
    response = quiet.get("/metrics")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "metrics_disabled")


def test_aliases_agree_with_our_own_metrics(plain: Server) -> None:
    """Each value under another server's name is the one under the name of srv."""
    families = list(text_string_to_metric_families(plain.get("/metrics").text))
    names = [other.name for other in families]
    assert len(names) == len(set(names))
    sums: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    for name, same in (
        ("srv_requests_running", ["vllm:num_requests_running", "sglang:num_running_reqs"]),
        ("srv_requests_queued", ["vllm:num_requests_waiting", "sglang:num_queue_reqs"]),
        ("srv_prompt_tokens_total", ["vllm:prompt_tokens_total", "sglang:prompt_tokens_total"]),
        ("srv_generated_tokens_total", ["vllm:generation_tokens_total", "sglang:generation_tokens_total"]),
        ("srv_cached_tokens_total", ["vllm:prefix_cache_hits_total"]),
        ("srv_step_tokens_count", ["vllm:iteration_tokens_total_count"]),
        ("srv_step_tokens_sum", ["vllm:iteration_tokens_total_sum"]),
        ("srv_inter_token_seconds_count", ["vllm:inter_token_latency_seconds_count"]),
        ("srv_inter_token_seconds_sum", ["sglang:inter_token_latency_seconds_sum"]),
        ("srv_request_seconds_sum", ["vllm:e2e_request_latency_seconds_sum", "sglang:e2e_request_latency_seconds_sum"]),
    ):
        assert [sums[alias] for alias in same] == [sums[name]] * len(same), name
    assert sums["vllm:generation_tokens_total"] >= 4
    assert 0 <= sums["vllm:kv_cache_usage_perc"] <= 1


def test_every_query_of_the_board_names_a_metric(watched: Server) -> None:
    """Panels of a board whose metric was renamed stay empty, and nobody notices."""
    board = json.loads(BOARD.read_text())
    served = {
        sample.name
        for family in text_string_to_metric_families(watched.get("/metrics").text)
        for sample in family.samples
    }
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 15
    for query in queries:
        named = set(METRIC.findall(query))
        assert named, query
        assert named <= served, query


@covers("bucket_time_to_first_token=1.0", "bucket_inter_token_latency=1.0", "bucket_e2e_request_latency=1.0")
def test_bucket_bounds(plain: Server, watched: Server) -> None:
    for name, alias, expected in (
        ("srv_time_to_first_token_seconds", "vllm:time_to_first_token_seconds", ["1.0", "+Inf"]),
        ("srv_inter_token_seconds", "sglang:inter_token_latency_seconds", ["1.0", "+Inf"]),
        ("srv_request_seconds", "vllm:e2e_request_latency_seconds", ["1.0", "+Inf"]),
    ):
        assert bounds(watched, name) == bounds(watched, alias) == expected
        assert len(bounds(plain, name)) > 10


@covers("collect_tokens_histogram=true", "collect_tokens_histogram=false")
@covers("prompt_tokens_buckets")
@covers("generation_tokens_buckets")
def test_histograms_of_token_counts(plain: Server, watched: Server) -> None:
    assert bounds(watched, "sglang:prompt_tokens_histogram") == ["2.0", "4.0", "+Inf"]
    assert bounds(watched, "vllm:request_generation_tokens") == ["4.0", "6.0", "8.0", "10.0", "12.0", "+Inf"]
    assert bounds(plain, "sglang:prompt_tokens_histogram") == []
    assert len(bounds(plain, "vllm:request_prompt_tokens")) > 10, "vLLM has them without an argument"
    assert watched.metrics()['srv_request_prompt_tokens_bucket{le="2.0",team="search"}'] == 0
    assert watched.metrics()['srv_request_prompt_tokens_bucket{le="4.0",team="search"}'] == 1


@covers("tokenizer_metrics_allowed_custom_labels")
@covers("tokenizer_metrics_custom_labels_header")
def test_custom_labels(plain: Server, watched: Server) -> None:
    assert watched.metrics()['srv_sequences_total{finish_reason="length",team="search"}'] == 1
    assert 'team="' not in plain.get("/metrics").text
    for labels, said in (
        ('{"color": "red"}', "allows the labels team"),
        ("team=a", "JSON object"),
        ('{"team": 3}', "JSON"),
    ):
        response = httpx.post(
            f"{watched.base}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-labels": labels}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_labels")
        assert said in response.json()["error"]["message"]
    complete(plain, {"x-labels": "team=a"})  # no argument asks for the header


@covers("log_requests=true", "log_requests=false")
@covers("log_requests_level=3", "log_requests_level=0")
def test_request_log(plain: Server, watched: Server, quiet: Server) -> None:
    assert logged(plain, "received") == logged(plain, "ended") == []
    received, ended = logged(watched, "received")[0], logged(watched, "ended")[0]
    assert (received["prompt"], received["params"]["max_tokens"], ended["completion_tokens"]) == ("a b c", 12, 12)
    assert len(ended["output"].split()) == 12
    received, ended = logged(quiet, "received")[0], logged(quiet, "ended")[0]
    assert received.keys() == {"rid", "prompt_tokens"}
    assert not {"output", "prompt", "params"} & ended.keys()


@covers("enable_request_time_stats_logging=true", "enable_request_time_stats_logging=false")
def test_time_of_each_stage(plain: Server, watched: Server) -> None:
    stages = logged(watched, "time of")[0]
    assert stages.keys() == {"rid", "queue", "prefill", "decode", "total"}
    assert stages["queue"] + stages["prefill"] + stages["decode"] == pytest.approx(stages["total"], abs=0.01)
    assert logged(plain, "time of") == []


def test_a_start_prints_about_ten_lines(plain: Server) -> None:
    """Device, backends, weights, memory, address; phases that were slow, which depends on the machine, come on top."""
    text, _, _ = plain.log_text().partition("Started server process")
    begun = [line for line in text.splitlines() if "; slow: " not in line]
    assert len(begun) <= 12, text
    for part in ("platform cpu:", "backends: ", "loaded ", "memory: ", "is ready on cpu", "serving "):
        assert any(part in line for line in begun), part
    assert "start of engine, weights" not in text


@covers("log_level_http=info", "log_level_http=error")
def test_log_level_http(plain: Server, watched: Server, quiet: Server) -> None:
    assert lines(watched, '"POST /v1/completions" 200')
    assert not lines(plain, "POST /v1/completions")
    assert lines(plain, "Started server process")
    assert not lines(quiet, "Started server process")


@covers("show_time_cost=true", "show_time_cost=false")
@covers("decode_log_interval=1", "decode_log_interval=40", "gc_warning_threshold_secs=0.0")
def test_lines_of_the_engine(plain: Server, watched: Server) -> None:
    """12 tokens are 12 steps or more; the plain server has not had 40."""
    assert len(lines(watched, "tokens/s")) >= 12
    assert "1 running" in lines(watched, "tokens/s")[0]
    assert "schedule" in lines(watched, "time of 1 steps")[0]
    assert not lines(plain, "time of ")
    assert not lines(plain, "tokens/s")
    assert lines(watched, "a garbage collection of generation")
    assert not lines(plain, "a garbage collection")


@covers("enable_trace=true", "enable_trace=false")
@covers("oltp_traces_endpoint")
def test_traces(watched: Server, traces: Collector) -> None:
    """The request is a child of the caller's span, lasts until the last byte, and contains its stages in order."""
    wait_until(lambda: any(span["trace"] == TRACE for span in traces.spans()), 30, "the spans arrive")
    spans = {span["name"]: span for span in traces.spans() if span["trace"] == TRACE}
    root = spans.pop("text_completion letters")
    assert (root["parent"], root["kind"]) == (SPAN, 2)
    assert list(spans) == ["queue", "prefill", "decode"]
    assert {span["parent"] for span in spans.values()} == {root["id"]}
    times = [root["begin"], *(span["begin"] for span in spans.values()), spans["decode"]["end"], root["end"]]
    assert times == sorted(times)
    shown = root["attributes"]
    assert (shown["gen_ai.usage.input_tokens"], shown["gen_ai.usage.completion_tokens"]) == (3, 12)
    assert shown["gen_ai.response.finish_reasons"] == ["length"]
    assert "a b c" not in json.dumps([*spans.values(), root])


@covers("bucket_time_to_first_token=2.0", "bucket_inter_token_latency=2.0", "bucket_e2e_request_latency=2.0")
@covers("log_level_http=debug", "log_requests_level=2", "decode_log_interval=80")
def test_traces_by_http(common: tuple[str, ...], traces: Collector, tmp_path: Path) -> None:
    """A streamed response of two sequences; what is left is exported when the server stops. Other values of more."""
    names = ("srv_time_to_first_token_seconds", "srv_inter_token_seconds", "srv_request_seconds")
    flags = (
        *("--enable-trace", "--oltp-traces-endpoint", traces.http, "--log-requests", "--log-level-http", "debug"),
        *("--bucket-time-to-first-token", "2", "--bucket-inter-token-latency", "2"),
        *("--bucket-e2e-request-latency", "2", "--decode-log-interval", "80"),
    )
    variables = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    trace = "1" * 32
    with launched(tmp_path / "log", *common, *flags, environment=variables) as server:
        complete(server, {"traceparent": f"00-{trace}-{SPAN}-01"}, stream=True, n=2)
        assert [bounds(server, name) for name in names] == [["2.0", "+Inf"]] * 3
        complete(server, prompt="a " * 600, max_tokens=70)
        assert not lines(server, "tokens/s")
        complete(server, max_tokens=20)
        wait_until(lambda: len(lines(server, "tokens/s")) == 1, 20, "80 steps are logged")
        received = logged(server, "received")[-2]
        assert len(received["prompt"]) < received["prompt_tokens"] * 2 - 1 == 1199
        assert lines(server, '"POST /v1/completions" 200')
        assert server.stop() == 0
    shown = sorted(span["name"] for span in traces.spans() if span["trace"] == trace)
    assert shown == ["decode", "decode", "prefill", "prefill", "queue", "queue", "text_completion letters"]


@covers("log_level_http=warning")
def test_log_level_http_warning(plain: Server, common: tuple[str, ...], tmp_path: Path) -> None:
    with launched(tmp_path / "log", *common, "--log-level-http", "warning") as server:
        assert lines(server, "api INFO")
        assert not lines(server, "Started server process")
        assert lines(plain, "Started server process")


@covers("endpoint:POST /start_profile", "endpoint:POST /stop_profile")
def test_profile(watched: Server, tmp_path: Path) -> None:
    assert watched.post("/start_profile").status_code == watched.post("/stop_profile").status_code == 401
    with watched.client(headers={"x-api-key": ADMIN}) as client:
        assert "no profile is being recorded" in client.post("/stop_profile").json()["error"]["message"]
        response = client.post("/start_profile", json={"output_dir": "nowhere"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "output_dir")
        assert client.post("/start_profile", json={"output_dir": str(tmp_path)}).status_code == 200
        assert "already" in client.post("/start_profile").json()["error"]["message"]
        complete(watched)
        (file,) = client.post("/stop_profile").json()["files"]
    assert Path(file).parent == tmp_path
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    assert any("aten::" in str(event.get("name")) for event in events)


@covers(*(f"endpoint:POST /{action}_expert_distribution_record" for action in ("start", "stop", "dump")))
def test_the_usage_of_experts(plain: Server, tmp_path: Path) -> None:
    """Every token of the one request chooses two experts in each layer; a server without a recorder says so.

    Metrics have the load of the same steps and of those of the start.
    """
    response = plain.post("/start_expert_distribution_record")
    assert response.json()["error"]["code"] == "expert_record_refused"
    small = make_small("qwen3_moe", tmp_path)
    flags = ("--model-path", str(small.folder), "--skip-tokenizer-init", "--expert-distribution-recorder-mode", "stat")
    flags = (*flags, "--enable-expert-distribution-metrics")
    with served(tmp_path / "log", "--device", "cpu", *flags) as server:
        assert server.post("/start_expert_distribution_record").json() == {"recording": True}
        sampling = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        assert server.post("/generate", input_ids=[3, 4, 5], sampling_params=sampling).status_code == 200
        usage = server.post("/dump_expert_distribution_record").json()
        since = server.post("/dump_expert_distribution_record").json()
        assert server.post("/stop_expert_distribution_record").json() == {"recording": False}
        metrics = expert_metrics(server)
    chosen = small.model.config.num_experts_per_tok
    assert (usage["layers"], usage["tokens"]) == ([0, 1, 2], 6)  # the last token of the output is not computed
    assert [sum(counts) for counts in usage["logical_count"]] == [6 * chosen] * 3
    assert (since["recording"], since["steps"], since["tokens"], since["logical_count"]) == (True, 0, 0, [])
    experts = small.model.config.num_experts
    read = read_location(json.dumps(usage), Mixtures("small", (0, 1, 2), 3, experts))  # --init-expert-location
    assert isinstance(read, LayerExpertCounts)
    assert read.tokens == tuple(map(tuple, usage["logical_count"]))
    for layer in ("0", "1", "2"):
        mean, busiest = (
            metrics["srv_expert_tokens_mean_total"][layer],
            metrics["srv_expert_tokens_busiest_total"][layer],
        )
        assert 6 * chosen / experts <= mean <= busiest <= experts * mean


def expert_metrics(server: Server) -> dict[str, dict[str, float]]:
    """By name, then by layer."""
    by_name: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("srv_expert_tokens") and sample.name.endswith("_total"):
                by_name.setdefault(sample.name, {})[sample.labels["layer"]] = sample.value
    return by_name


def test_a_folder_for_profiles_needs_an_admin_key(plain: Server, tmp_path: Path) -> None:
    response = plain.post("/start_profile", output_dir=str(tmp_path))
    assert response.json()["error"]["code"] == "output_dir_without_admin_key"
    assert not list(tmp_path.iterdir())


def test_top_shows_a_server(plain: Server) -> None:
    complete(plain)
    command = srv_command("top", "--url", plain.base, "--count", "2", "--interval", "0.2")
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for part in ("running", "queued", "KV pool", "pages", "cache hits", "tokens/s"):
        assert part in shown
    failed = subprocess.run(
        srv_command("top", "--url", f"http://127.0.0.1:{free_port()}"), capture_output=True, text=True, timeout=60
    )
    assert failed.returncode == 2
    assert "cannot be watched" in failed.stderr


def test_refusals(common: tuple[str, ...], tmp_path: Path) -> None:
    """All at once, before anything is started."""
    (tmp_path / "file").write_text("")
    status, text, _ = launch(*common, "--crash-dump-folder", str(tmp_path / "file" / "below"))
    assert status == 2
    assert "crash_dump_folder" in text
    flags = ("--no-enable-metrics", "--collect-tokens-histogram", "--tokenizer-metrics-custom-labels-header", "x-y")
    status, text, _ = launch(*common, *flags)
    assert status == 2
    assert "enable_metrics is false" in text
    assert "tokenizer_metrics_allowed_custom_labels is not set" in text


@covers("crash_dump_folder")
def test_crash_dump_and_replay(plain: Server, watched: Server, dumps: Path) -> None:
    """After the engine is killed, the requests are in a file from which another server can be sent them.

    The last test: it ends the server.
    """
    answer = complete(watched, prompt="d e f", max_tokens=3).json()["choices"][0]["text"]
    assert not list(dumps.iterdir())
    os.kill(watched.engine_pid(), signal.SIGKILL)
    assert watched.wait() == 1
    (file,) = dumps.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    header, *requests = map(json.loads, file.read_text().splitlines())
    assert (header["format"], header["model"]) == ("srv-crash-dump", "letters")
    assert ADMIN not in file.read_text()
    assert requests[0]["body"]["prompt"] == "a b c"
    assert requests[-1]["body"]["prompt"] == "d e f"
    command = srv_command("replay", str(file), "--url", plain.base, "--speed", "0", "--show")
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    replayed = [line for line in process.stdout.splitlines() if "/v1/completions" in line]
    assert len(replayed) == sum(request["path"] == "/v1/completions" for request in requests)
    assert json.dumps(answer)[1:-1] in process.stdout  # greedy: the other server gives the same answer

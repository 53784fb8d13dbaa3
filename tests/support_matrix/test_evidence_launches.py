"""The support page compared with servers: values that work on this CPU can be started and served with, and are reported
by the server; all others are refused with their code before weights are read.

The page is read as CSV; the expected behaviour of a server follows from its command line. A value is
verified by a start only if the client sees what it changes (`evidence_world.SEEN`). Of all others, a start shows that
they are accepted and reported, and do not change the output: their evidence has the level E3 and the note "starts".
"""

from __future__ import annotations

import csv
import json
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml
from argument_effects import OF_OWN_SERVERS
from committed_matrix import committed_matrix
from e2e_support import Server, free_port, launch
from every import every
from evidence_world import (
    BODY_LIMITS,
    CONTEXT,
    ELSEWHERE,
    KEY,
    LOWEST_PORT,
    OUTPUT,
    UNSET,
    Row,
    Tiny,
    backends,
    body_limit,
    cells,
    choices,
    covering_array,
    factors,
    implementations,
    make_tiny,
    name_of,
    plain,
    seen_cells,
)

from srv.args.config import ARGUMENTS
from srv.args.prerequisites import with_prerequisite
from srv.cli.main import main
from srv.platform.op_choice import NAMED_BY
from srv.platform.probe import probe
from srv.platform.registry import find_platforms
from srv_matrix.data import to_csv
from srv_matrix.pytest_plugin import covers
from srv_matrix.records import STARTS, Level

WORKS = ("supported", "limited", "experimental")
REFUSED = 2
PLANNED = "planned"
ATTENTION = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
SPARSE = ("nsa_prefill_backend", "nsa_decode_backend")  # tests/core/args/test_effects_sparse.py, with an indexer
WITHOUT_INDEXER = {f"{name}=native": "inert" for name in SPARSE}  # of the model here: cells are judged by one with it
IMPATIENT = ("engine_start_timeout_seconds=0.01",)
NOT_STARTED = {"mem_fraction_static=0.01": "1 % of the memory is less than the runtime needs"}
SMALLEST_LIMITS = {
    *("max_connections=1", "connection_timeout_seconds=0.01"),
    *("watchdog_timeout=3.0", "soft_watchdog_timeout=3.0"),
}  # tests/e2e/test_e2e_limits.py
ENGINE_SWITCHES = ("enable_layer_markers", "enable_deterministic_inference")  # tests/core start engines
MODEL_SWITCHES = (
    "trust_remote_code",  # tests/core/args/test_effects_of_model_files.py
    "disable_mla_ragged_prefill",  # tests/platforms/cpu/test_latent_attention.py
    "disable_chunked_prefix_cache",  # also there
)
RECURRENT_NUMBERS = {
    "max_mamba_cache_size=1",
    *(f"mamba_full_memory_ratio={ratio}" for ratio in (0.01, 0.2, 0.4)),
    *(f"mamba_track_interval={interval}" for interval in (1, 256, 512)),
}  # tests/core/args/test_effects_recurrent.py
ROWS = covering_array()
IMPLEMENTED = tuple(name for name, argument in ARGUMENTS.items() if argument.status == "implemented")


class Started(Server):
    """A server with the address, port and key of its row."""

    def __init__(self, row: Row, words: Sequence[str], log: Path) -> None:
        super().__init__(words, log, port=row["port"] or free_port())
        self.row = row

    @property
    def base(self) -> str:
        return f"http://{self.row['host']}:{self.port}"

    def client(self, **more: Any) -> httpx.Client:
        key = self.row["api_key"]
        return super().client(headers={} if key is UNSET else {"authorization": f"Bearer {key}"}, **more)


def _others(row: Row) -> tuple[str, ...]:
    """The cells of a row of which a start shows no difference."""
    seen = seen_cells(row)
    return tuple(cell for cell in cells(row) if cell not in seen)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("model"))


class Ended(NamedTuple):
    """The exit status of a server, and its log."""

    status: int
    log: str


def start_and_judge(row: Row, tiny: Tiny, folder: Path) -> Ended:
    """Start a server with the values of a row, check what it reports and serves, and stop it."""
    server = Started(row, tiny.command_line(row, folder / "serve.yaml"), folder / "log")
    try:
        server.start()
        info = server.get("/get_server_info").json()
        assert_reads_back(row, info["arguments"], tiny)
        assert_shows(row, server, info, tiny)
        assert_serves(row, server, info, tiny)
        ended = Ended(server.stop(), server.log_text())
        assert_log(row, ended.log)
        return ended
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()


# ---- values that work


@pytest.fixture(scope="module")
def end_of(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Ended]:
    """Starts and judges the server of a row, once for the tests that ask for it."""
    ended: dict[str, Ended] = {}

    def end(row: Row) -> Ended:
        key = repr(row)
        if key not in ended:
            ended[key] = start_and_judge(row, tiny, tmp_path_factory.mktemp("start"))
        return ended[key]

    return end


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=covers(*seen_cells(row), platform="cpu"), id=name_of(row, number))
        for number, row in enumerate(ROWS, 1)
    ],
)
def test_what_is_said_to_work_is_seen_by_a_client(row: Row, end_of: Callable[[Row], Ended]) -> None:
    assert end_of(row).status == 0, end_of(row).log


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            marks=covers(*_others(row), platform="cpu", level=Level.E3.name, note=STARTS),
            id=name_of(row, number),
        )
        for number, row in enumerate(ROWS, 1)
    ],
)
def test_what_is_said_to_work_starts_serves_and_reads_back_equal(row: Row, end_of: Callable[[Row], Ended]) -> None:
    assert end_of(row).status == 0, end_of(row).log


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("names", "backend"),
    [
        pytest.param(
            names,
            backend,
            marks=covers(*(f"{name}={backend}" for name in names), platform="cpu"),
            id=f"{names[0]}-{backend}",
        )
        for backend in backends("attention")
        for names in (("attention_backend",), ("prefill_attention_backend", "decode_attention_backend"))
    ],
)
def test_each_attention_backend_serves(names: tuple[str, ...], backend: str, tiny: Tiny, tmp_path: Path) -> None:
    ended = start_and_judge(plain(**dict.fromkeys(names, backend)), tiny, tmp_path)
    assert ended.status == 0, ended.log


def assert_reads_back(row: Row, reported: dict[str, Any], tiny: Tiny) -> None:
    """The server reports every value that was set; "auto" may have been resolved to another value."""
    values = {**row, "tokenizer_path": "tokens"} if row["load_format"] == "gguf" else dict(row)
    if row["port"] is UNSET:
        del values["port"]  # the test has chosen a free one
    for name, value in values.items():
        if value is UNSET:
            assert reported[name]["layer"] != "user", name
        elif value == "auto":
            assert reported[name]["value"] in factors()[name], name
        elif name == "api_key":
            assert KEY not in str(reported[name])
            assert reported[name]["layer"] == "user"
        elif name in ("tokenizer_path", "chat_template"):
            assert Path(reported[name]["value"]).is_relative_to(tiny.root), name
        else:
            assert (reported[name]["value"], reported[name]["layer"]) == (value, "user"), name
    assert (reported["device"]["value"], reported["model_path"]["value"]) == ("cpu", str(tiny.model_path(row)))


def assert_shows(row: Row, server: Started, info: dict[str, Any], tiny: Tiny) -> None:
    """The effects of values that are visible without sending a prompt."""
    assert info["page_size"] == (row["page_size"] or info["arguments"]["page_size"]["value"])
    assert info["pages"] == [row["max_total_tokens"] // info["page_size"]]
    for slot in ("sampling_backend", "prefill_attention_backend", "decode_attention_backend"):
        expected = row.get(slot) or (row.get("attention_backend") if slot != "sampling_backend" else UNSET)
        assert expected is UNSET or f"{slot} = {expected} " in info["backends"][slot]
    model = server.get("/v1/models").json()["data"][0]
    assert model["id"] == (row["served_model_name"] or tiny.model_path(row).name.removesuffix(".gguf"))
    assert model["max_model_len"] == min(row["context_length"] or CONTEXT, row["max_total_tokens"])
    anonymous = httpx.get(f"{server.base}/v1/models", timeout=30).status_code
    assert anonymous == (200 if row["api_key"] is UNSET else 401)


def assert_serves(row: Row, server: Started, info: dict[str, Any], tiny: Tiny) -> None:
    """Prompts are served, with the same output twice; without rounding it is that of transformers."""
    whole = row["context_length"] != 2
    prompt = list(tiny.prompt) if whole else list(tiny.prompt[:1])
    count = OUTPUT if whole else 1
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params}
    first, second = server.generate(**body), server.generate(**body)
    assert first["output_ids"] == second["output_ids"]
    assert len(first["output_ids"]) == count
    exact = row["dtype"] in ("auto", "float32") and row["kv_cache_dtype"] in (UNSET, "auto", "float32")
    if exact and whole and row["load_format"] != "dummy":
        assert tuple(first["output_ids"]) == tiny.tokens
    reused = 0 if row["disable_radix_cache"] else (len(prompt) - 1) // info["page_size"] * info["page_size"]
    assert [one["meta_info"]["cached_tokens"] for one in (first, second)] == [0, reused]
    limit = row["max_stop_strings"]
    for count, status in ((limit, 200), (limit + 1, 400)):
        stop = [f"stop {number}" for number in range(count)]
        answer = server.post("/generate", input_ids=prompt, sampling_params={"max_new_tokens": 1, "stop": stop})
        assert answer.status_code == status, answer.text
    assert server.post("/flush_cache").status_code == 200
    assert server.generate(**body)["meta_info"]["cached_tokens"] == 0
    bytes_allowed = min(body_limit(row, name) for name in BODY_LIMITS)
    short = json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}})
    with server.client() as client:
        for size, status in ((bytes_allowed, 200), (bytes_allowed + 1, 413)):
            answer = client.post("/generate", content=short.ljust(size), headers={"content-type": "application/json"})
            assert answer.status_code == status, answer.text


def assert_log(row: Row, text: str) -> None:
    level = row["log_level"] or "info"
    assert (" INFO " in text) == (level in ("debug", "info"))
    assert (" DEBUG " in text) == (level == "debug")


@pytest.mark.slow
@pytest.mark.e2e
@covers("load_format=gguf", platform="cpu")
def test_a_gguf_file_serves_what_the_folder_of_the_same_model_does(tiny: Tiny, tmp_path: Path) -> None:
    """In float32, so that the tokens are those of transformers."""
    ended = start_and_judge(plain(load_format="gguf"), tiny, tmp_path)
    assert ended.status == 0, ended.log


@pytest.mark.slow
@pytest.mark.e2e
@covers(f"port={LOWEST_PORT}", platform="cpu")
def test_the_lowest_port(tiny: Tiny, tmp_path: Path) -> None:
    with socket.socket() as free:
        try:
            free.bind(("127.0.0.6", LOWEST_PORT))
        except PermissionError:
            pytest.skip(
                "this user may not listen on low ports: run as root, or lower net.ipv4.ip_unprivileged_port_start"
            )
    ended = start_and_judge(plain(host="127.0.0.6", port=LOWEST_PORT), tiny, tmp_path)
    assert ended.status == 0, ended.log


@pytest.mark.slow
@pytest.mark.e2e
@covers(*IMPATIENT, platform="cpu")
def test_the_least_patience(tiny: Tiny, tmp_path: Path) -> None:
    """No engine is ready within 0.01 seconds, so the launch fails."""
    words = [
        *tiny.command_line(plain(), tmp_path / "serve.yaml"),
        "--engine-start-timeout-seconds=0.01",
        f"--port={free_port()}",
    ]
    status, text, _ = launch(*words)
    assert (status, "not ready after 0.01 seconds" in text) == (1, True), text


# ---- values that are refused


@pytest.fixture(scope="module")
def cpu_page() -> list[dict[str, str]]:
    """The page's cells of arguments and values on every variant of the CPU."""
    cells = csv.DictReader(to_csv(committed_matrix()).splitlines())
    return [cell for cell in cells if cell["platform"] == "cpu" and cell["kind"] in ("arg", "value")]


@pytest.fixture(scope="module")
def page(cpu_page: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those of the variant of this machine."""
    device = probe(find_platforms()["cpu"]).device
    assert device is not None
    return [cell for cell in cpu_page if cell["variant"] == device.variant]


def refusals(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str]:
    """(argument, value) -> code of each refusal of a launch in this process, which must start nothing."""
    children = psutil.Process().children()
    assert main(["launch", *words]) == REFUSED
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert psutil.Process().children() == children
    lines = re.findall(r"^  - (\w+) = (.*?) \(set by .*\[(\w+)\]$", printed, re.MULTILINE)
    return {(name, value): code for name, value, code in lines}


def batches(page: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Configurations with all values that the page says are refused, each with one value per argument.

    None sets an argument otherwise than one of its values needs.
    """
    starts: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    for cell in page:
        name, _, text = cell["feature"].partition("=")
        if cell["status"] in WORKS or ARGUMENTS[name].default == (value := another(name, text)):
            continue
        if any(name in batch and batch[name] == value for batch in starts):
            continue
        needed = with_prerequisite(name, value)
        for batch, values in zip(starts, together, strict=True):
            if name not in batch and all(values.get(other, wanted) == wanted for other, wanted in needed.items()):
                break
        else:
            starts.append(batch := {})
            together.append(values := {})
        batch[name] = value
        values |= needed
    return starts


def another(name: str, text: str) -> Any:
    """The value that a cell names; for the cell of an argument, a valid value that is not the default."""
    argument = ARGUMENTS[name]
    if text:
        return argument.parse(text)
    of_type: dict[type, tuple[Any, ...]] = {
        bool: (True, False),
        int: (2, 3, 1, 0, 64, 4096),
        float: (0.5, 2.0),
        Path: (Path("x"),),
    }
    texts = ("x", "1", "{}", '{"x": 1}', "[]", "x=1", "/x", "127.0.0.1:1", "all", "default", "[2]")
    tried = argument.choices or of_type.get(argument.kind.base, texts)
    values = [(value,) if argument.kind.many else value for value in tried]
    return next(value for value in values if value != argument.default and argument.validation_error(value) is None)


@pytest.mark.slow
def test_what_is_said_not_to_work_is_refused_with_its_code(
    page: list[dict[str, str]], tiny: Tiny, tmp_path: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, with one value for many arguments at once, set by a file, which can set all of them.

    A value that has an effect only with another argument is set with it, and may be refused because that one is.
    """
    codes = {cell["feature"]: PLANNED if cell["core"] == PLANNED else cell["reason_code"] for cell in page}
    tried: set[str] = set()
    wrong: list[str] = []
    for batch in batches(page):
        needed = {name: with_prerequisite(name, value) for name, value in batch.items()}
        values = {**{name: value for requirements in needed.values() for name, value in requirements.items()}, **batch}
        config = tmp_path / "serve.yaml"
        config.write_text(yaml.safe_dump({name: ARGUMENTS[name].kind.dump(value) for name, value in values.items()}))
        base = ["--device=cpu", f"--model-path={tiny.folder}", f"--port={taken_port}", f"--config={config}"]
        refused = refusals(base, capsys)
        for name, value in batch.items():
            shown = ARGUMENTS[name].show(value)
            cell = f"{name}={shown}" if f"{name}={shown}" in codes else name
            tried |= {cell, name}
            said = [
                refused[key]
                for other in needed[name]
                if (key := (other, ARGUMENTS[other].show(values[other]))) in refused
            ]
            code = refused.get((name, shown)) or next(iter(said), None)
            if code != WITHOUT_INDEXER.get(cell, codes[cell]):
                wrong.append(f"{cell}: the page says {codes[cell]}, the launch {code}")
    assert wrong == []
    default = {f"{name}={argument.show(argument.default)}" for name, argument in ARGUMENTS.items()}
    assert {cell["feature"] for cell in page if cell["status"] not in WORKS} - default <= tried


@every(
    ("words", "code"),
    [
        (("--speculative-algorithm=EAGLE",), "planned"),
        (("--attention-backend=flashmla",), "unknown_backend"),
        (("--revision=main",), "revision_without_hub"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.e2e
def test_a_real_process_refuses_the_same(words: tuple[str, ...], code: str, tiny: Tiny) -> None:
    status, text, _ = launch("--device=cpu", f"--model-path={tiny.folder}", f"--port={free_port()}", *words)
    assert (status, f"[{code}]" in text, "engine" in text) == (REFUSED, True, False), text


# ---- completeness


@pytest.mark.slow
def test_whatever_the_page_says_of_what_core_has_is_tried(
    page: list[dict[str, str]], cpu_page: list[dict[str, str]]
) -> None:
    """Each working cell of an implemented argument is a value of one of the servers above.

    Numbers that other tests cover have their own cells, which the page shows as verified on some variant: this machine
    may have one on which no evidence was recorded yet.
    """
    started = {cell for row in ROWS for cell in cells(row)} | {f"port={LOWEST_PORT}", *IMPATIENT, *NOT_STARTED}
    started |= {f"{slot}={name}" for slot in ATTENTION for name in backends("attention")}
    started |= {f"quantization={method}" for method in choices("quantization")}  # tests/core/args/test_effects.py
    started |= {f"torchao_config={method}" for method in choices("torchao_config")}  # also there
    started |= {
        f"{name}={value}" for name in ("disable_graphs", "disable_graph_padding") for value in ("true", "false")
    }
    capture = (
        "enable_graph_gc",
        "enable_graph_profiling",
        "enable_torch_compile",
        "enable_torch_compile_debug_mode",
    )  # tests/core/args/test_effects_of_capture.py
    started |= {f"{name}={value}" for name in capture for value in ("true", "false")}
    started |= {f"torch_compile_max_bs={rows}" for rows in (1, 32, 64)}  # also there
    started |= {f"graph_max_batch_size={size}" for size in (1, 16)} | {"graph_batch_sizes=1"}
    started |= {f"{name}={value}" for name in ENGINE_SWITCHES for value in ("true", "false")}
    started |= {"base_device_id=0", "device_id_step=1", "numa_node=0"}  # tests/core/args/test_effects_placing.py
    started |= {"enable_piecewise_graphs=false", "piecewise_graph_max_tokens=4096"}  # their defaults, in every start
    started |= SMALLEST_LIMITS
    started |= {f"{name}={number}" for name in ("dp_size", "ep_size") for number in (1, 2)}
    started |= {f"load_balance_method={method}" for method in choices("load_balance_method")}
    started |= {
        f"{name}={value}" for name in ("enable_dp_attention", "enable_dp_lm_head") for value in ("true", "false")
    }
    started |= {"is_embedding=true", "is_embedding=false"}  # tests/e2e
    started |= {f"pooling={mode}" for mode in choices("pooling")}  # also there
    started |= {f"{name}=torch_native" for name in SPARSE}
    started |= {f"moe_runner_backend={name}" for name in ("auto", *backends("moe"))}  # tests/core/args
    started |= {f"activation_precision={value}" for value in choices("activation_precision")}  # tests/platforms/cpu
    started |= {f"mxfp4_moe_precision={value}" for value in choices("mxfp4_moe_precision")}  # also there
    started |= {
        f"{name}={value}" for op, name in NAMED_BY.items() for value in ("auto", *implementations(op))
    }  # also there
    started |= {f"{name}={value}" for name in MODEL_SWITCHES for value in ("true", "false")}
    started |= {f"mamba_ssm_dtype={dtype}" for dtype in choices("mamba_ssm_dtype")} | RECURRENT_NUMBERS
    started |= {f"enable_return_hidden_states={value}" for value in ("true", "false")}  # also there
    started |= {f"disable_hybrid_swa_memory={value}" for value in ("true", "false")}  # tests/core/args/test_effects.py
    started |= {f"swa_full_tokens_ratio={ratio}" for ratio in (0.0, 1.0)}  # also there
    started |= {f"dequantize_weights={value}" for value in ("true", "false")}  # also there
    started.add("speculative_algorithm=NGRAM")  # tests/core/args/test_effects.py
    started |= {cell.partition("=")[0] for cell in started} | ELSEWHERE.keys()
    numbers = [name for name in IMPLEMENTED if ARGUMENTS[name].kind.base in (int, float)]
    verified = {cell["feature"] for cell in cpu_page if cell["level"] in ("E4", "E5")}
    working = [
        cell["feature"]
        for cell in page
        if cell["status"] in WORKS
        and not (cell["feature"].partition("=")[0] in numbers and cell["feature"] in verified)
    ]
    others = set(IMPLEMENTED) - OF_OWN_SERVERS.keys()
    assert [cell for cell in working if cell.partition("=")[0] in others and cell not in started] == []


def test_every_choice_and_both_switches_are_among_the_starts() -> None:
    tried = {cell for row in ROWS for cell in cells(row)}
    for name in IMPLEMENTED:
        argument = ARGUMENTS[name]
        if name not in ELSEWHERE and (argument.choices or argument.kind.base is bool):
            values = ("true", "false") if argument.kind.base is bool else argument.choices
            expected = {f"{name}={value}" for value in values if argument.planned_reason(argument.parse(value)) is None}
            assert expected <= tried

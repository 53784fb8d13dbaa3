"""The command line as an operator uses it: exit status, output, imports, and never a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from args_world import CONFIG
from every import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from platform_plugins import write_imagined_plugin

import srv
from srv.args.config import ARGUMENTS, DEPRECATED
from srv.cli.main import error_text, main
from srv.errors import Refusal, Rejection


@pytest.fixture(autouse=True)
def _imagined(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The platform "imagined" is installed, and no SRV_ variable is set."""
    folder = tmp_path_factory.mktemp("imagined")
    write_imagined_plugin(folder, "manifest(backend('plain', 1), backend('wide', 9))")
    monkeypatch.syspath_prepend(folder)
    for argument in ARGUMENTS.values():
        monkeypatch.delenv(argument.variable, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a configuration and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"srv {srv.__version__}\n"


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("launch", "plan", "args", "platforms"))


def printed_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device" in printed_help(["args", "explain", "--help"], capsys)


@every("command", ["plan", "launch"])
def test_help_shows_what_works_and_nothing_else(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = (printed_help([command, flag], capsys) for flag in ("--help", "--help-all"))
    shown = {flag for flag in re.findall(r"^  (--[\w-]+)", short, re.MULTILINE) if flag != "--help-all"}
    own_flags = {"--config", "--dialect", "--json", "--kernels", "--fit"}
    assert shown - own_flags == {argument.flag for argument in ARGUMENTS.values() if not argument.arg.planned}
    assert "planned:" not in short
    assert all(f"  {argument.flag}" in whole for argument in (*ARGUMENTS.values(), *DEPRECATED.values()))


def test_a_plan_is_wrapped_for_a_terminal_and_whole_for_a_program(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"plan --device imagined:mk1 --model-path {folder} --load-format dummy".split()
    printed = {}
    monkeypatch.setenv("COLUMNS", "100")  # of the terminal
    for width in (None, 100):
        monkeypatch.setattr(sys.stdout, "isatty", lambda shown=width is not None: shown)
        assert main(words) == 0
        printed[width] = capsys.readouterr().out
    assert max(len(line) for line in printed[None].splitlines()) > 100
    assert all(len(line) <= 100 or len(line.split()) == 1 for line in printed[100].splitlines())
    assert printed[100].split() == printed[None].split()
    begins = [line for line in printed[None].splitlines() if line]
    continued = [
        line for line in printed[100].splitlines() if line and not any(begin.startswith(line) for begin in begins)
    ]
    assert continued
    assert all(line.startswith("    ") for line in continued)


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunch"]) == 2
    assert "Did you mean launch?" in capsys.readouterr().err


@every("words", [["args", "list", "--pagesize"], ["args", "explain"], ["args", "show"]])
def test_bad_command_line_of_a_command_without_arguments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("srv: 1 refusal:\n  - ")


def test_explain_prints_the_whole_declaration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "explain", "page-size"]) == 0
    assert capsys.readouterr().out == (
        "page_size (memory)\n"
        f"  {ARGUMENTS['page_size'].arg.help}\n"
        "\n"
        "  flag         --page-size TOKENS\n"
        "  environment  SRV_PAGE_SIZE\n"
        "  config file  page_size\n"
        "  type         int, at least 1\n"
        "  unit         tokens\n"
        "  default      1\n"
        "  needs        paged_kv\n"
    )


def test_explain_prints_the_value_on_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "explain", "attention_backend", "--device", "imagined:mk1"]) == 0
    out = capsys.readouterr().out
    assert "on imagined:mk1\n  attention_backend = wide because prefill and decode both use it\n" in out
    assert "available backends: plain, wide" in out


def test_explain_of_a_misspelt_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "explain", "page-siz"]) == 2
    assert "Did you mean page_size?" in capsys.readouterr().err


def test_list_as_json_has_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed["arguments"]] == [*ARGUMENTS, *DEPRECATED]


def test_plan_prints_values_backends_and_budget(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --device imagined:mk1,memory=2GiB --model-path {folder} --load-format dummy --page-size 16".split()
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "device  imagined:mk1, 1 x 2.00 GiB, Imagined One\n" in out
    assert "page_size = 16 because set by command line\n    overridden: 1 because generic default\n" in out
    assert "    not plain: fits, but its priority 1 is not higher than 9\n" in out
    assert "context_length = 512 because" in out
    assert "max_request_tokens: 512" in out


def test_plan_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --json --device imagined:mk1 --model-path {folder} --load-format dummy --api-key k3y".split()
    assert main(words) == 0
    out = capsys.readouterr().out
    plan = json.loads(out)
    assert plan["accepted"] is True
    assert plan["arguments"]["page_size"]["value"] == 1
    assert plan["backends"]["sampling_backend"]["name"] == "dice"
    assert plan["budget"]["pages"][0] > 1000
    assert "k3y" not in out


def test_plan_collects_refusals_of_device_model_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--device", "imagine:mk1", "--model-path", "./nowhere/x", "--page-size", "0"]
    assert main([*words, "--port", "x", "--pagesize", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("srv: 5 refusals:\n")
    for code in ("[unknown_platform]", "[not_found]", "[unknown_flag]"):
        assert code in err
    assert err.count("[bad_value]") == 2


def test_refusals_of_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--device", "imagined:mk1", "--pp-size", "2"]) == 2
    (refusal,) = json.loads(capsys.readouterr().out)["refusals"]
    assert (refusal["code"], refusal["what"], refusal["value"]) == ("planned", "pp_size", "2")


def test_planned_values_are_resolved_and_a_launch_would_refuse_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What follows from them is shown beside the refusals, as text and as JSON."""
    words = (
        f"plan --device imagined:mk1 --model-path {folder} --load-format dummy --speculative-algorithm EAGLE".split()
    )
    assert main([*words, "--pp-size", "2"]) == 2
    printed = capsys.readouterr()
    assert "launch would refuse: speculative_algorithm (planned), pp_size (planned)" in printed.out
    for line in (
        "speculative_num_steps = 5 because that number suits the drafter",
        "max_running_requests = 48 because each request has several tokens to verify per step",
        "disable_overlap_schedule = true because ",
        "drafter: ",
        "pages: ",
        "note: the memory of weights and KV pool is that of tp_size alone, without pp_size",
    ):
        assert line in printed.out, line
    assert printed.err.startswith("srv: 2 refusals:\n")
    assert main([*words, "--json"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert (plan["accepted"], [refusal["code"] for refusal in plan["refusals"]]) == (False, ["planned"])
    assert plan["arguments"]["speculative_num_draft_tokens"]["value"] == 8
    assert plan["budget"]["pages"][0] > 1000


def test_a_violated_constraint_leaves_the_rest_of_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --json --device imagined:mk1 --model-path {folder} --load-format dummy".split()
    assert main([*words, "--context-length", "99999"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert [refusal["code"] for refusal in plan["refusals"]] == ["context_over_model"]
    assert plan["budget"]["page_size"] == 1


def test_a_plan_says_what_it_has_not_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --json --device imagined:mk1 --model-path {folder} --load-format dummy".split()
    assert main(words) == 0
    (unchecked,) = json.loads(capsys.readouterr().out)["unchecked"]
    assert "tokenizer" in unchecked


def test_a_plan_notes_the_devices_that_no_rank_uses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --json --model-path {folder} --load-format dummy --device".split()
    assert main([*words, "imagined:mk1,count=4"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note == "device: one rank uses one of the 4 devices; the others are not used"
    assert main([*words, "imagined:mk1,count=1"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_plan_refuses_a_pool_without_pages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --device imagined:mk1,memory=1MiB --model-path {folder} --load-format dummy".split()
    assert main(words) == 2
    assert "[pool_too_small]" in capsys.readouterr().err


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@every(
    "words",
    [["launch", "--help"], ["plan", "--help"], ["args", "list"], ["plan", "--device", "cpu:avx2,memory=8GiB"]],
)
def test_torch_is_not_imported(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from srv.cli.main import main\n"
        "try:\n"
        f"    status = main({words!r})\n"
        "except SystemExit as ended:\n"
        "    status = ended.code\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'status {status}, imported {heavy}' if status or heavy else 0)\n"
    )
    process = run_python(code)
    assert process.returncode == 0, process.stderr


@every("options", [(), ("-P",)])
def test_module_can_be_run_as_the_command_in_any_folder(options: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("argparse", "msgspec", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    command = [sys.executable, *options, "-m", "srv", "--version"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (process.stdout, process.stderr) == (f"srv {srv.__version__}\n", "")


FLAGS = st.sampled_from([flag for argument in ARGUMENTS.values() for flag in argument.flags])
VALUES = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "auto", "-1", "0", "true", "imagined:mk1", "imagined:mk1,memory=1KiB", "wide", "dice", "%", "="]
    ),
)
WORDS: Any = st.lists(
    st.one_of(
        FLAGS,
        VALUES,
        st.tuples(FLAGS, VALUES).map("=".join),
        st.text(max_size=8).map("--{}".format),
    ),
    max_size=8,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS)
def test_no_command_line_causes_a_traceback(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["plan", "--device=imagined:mk1", f"--model-path={folder}", "--load-format=dummy", *words])
    except SystemExit as ended:  # --help
        status = int(ended.code or 0)
    captured = capsys.readouterr()
    assert status in (0, 2)
    if status == 2:
        assert captured.err.startswith("srv: ")
        assert captured.err.count("\n  - ") >= 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: f"port: {text}".encode())))
def test_no_config_file_causes_a_traceback(raw: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(raw)
    status = main(["plan", "--device=imagined:mk1", "--model-path=./nowhere/x", "--config", str(path)])
    assert status == 2  # at least the model does not exist
    assert capsys.readouterr().err.startswith("srv: ")


def test_refusals_are_wrapped_between_words_on_a_terminal() -> None:
    reason = "requires page_size 128, not 16, which is a reason that is longer than one line of the terminal"
    refusal = Refusal([Rejection("no_backend_fits", "page_size", "16", "command line", reason, "Leave it out.")])
    assert error_text(refusal).count("\n") == 2
    lines = error_text(refusal, 80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "[no_backend_fits]" in lines[-1]
    assert " ".join(line.strip() for line in lines) == " ".join(error_text(refusal).split())
    narrow = error_text(refusal, 12).splitlines()
    assert "    [no_backend_fits]" in narrow

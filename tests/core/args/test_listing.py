"""`srv args`: lists with filters and counts, the schema of the configuration file, completion, explanations."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from every import every
from platform_plugins import write_imagined_plugin

from srv.args.config import ARGUMENTS, DEPRECATED, GROUPS, find_argument_or_deprecated
from srv.args.schema import make_schema
from srv.args.yaml import read_text
from srv.cli.main import main

COUNT = len(ARGUMENTS) + len(DEPRECATED)


@pytest.fixture(autouse=True)
def _imagined(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two platforms are installed: "imagined", which supports every argument, and "poor".

    "poor" has no pages, and its schedule_conservativeness is fixed.
    """
    folder = tmp_path_factory.mktemp("platforms")
    capable = "CAPABLE | {'batch_invariant', 'piecewise_graphs', 'torch_compile'}"
    write_imagined_plugin(folder, f"manifest(backend('plain', 1), capabilities={capable})")
    support = "Support('schedule_conservativeness', 'unsupported', 'it is fixed there')"
    write_imagined_plugin(folder, f"manifest(capabilities=({capable}) - {{'paged_kv'}}, support=({support},))", "poor")
    monkeypatch.syspath_prepend(folder)


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["args", *words]) == 0
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(output(capsys, "list", "--json", *words))


@every("status", ["implemented", "planned", "deprecated"])
def test_list_by_status(status: str, capsys: pytest.CaptureFixture[str]) -> None:
    everything = (*ARGUMENTS.values(), *DEPRECATED.values())
    wanted = {argument.name for argument in everything if argument.status == status}
    answer = listed(capsys, "--status", status)
    assert {entry["name"] for entry in answer["arguments"]} == wanted
    assert answer["counts"]["status"] == {status: len(wanted)}
    assert f"{len(wanted)} arguments: {len(wanted)} {status}\n" in output(capsys, "list", "--status", status)


@every("group", GROUPS)
def test_list_by_group(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = listed(capsys, "--group", group)
    assert {entry["group"] for entry in answer["arguments"]} == {group}
    text = output(capsys, "list", "--group", group)
    assert text.startswith(f"{group}\n")
    assert all(f"  {entry['name']} " in text for entry in answer["arguments"])


def test_counts_by_status_and_platform(capsys: pytest.CaptureFixture[str]) -> None:
    counts = listed(capsys)["counts"]
    assert sum(counts["status"].values()) == COUNT
    assert counts["platforms"]["imagined:mk1"] == counts["status"]
    assert counts["platforms"]["poor:mk1"]["unsupported"] == 2
    assert sum(counts["platforms"]["poor:mk1"].values()) == COUNT


def test_list_on_a_platform_marks_unsupported_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    answer = listed(capsys, "--platform", "poor:mk1", "--status", "unsupported")
    assert {entry["name"] for entry in answer["arguments"]} == {"page_size", "schedule_conservativeness"}
    text = output(capsys, "list", "--platform", "poor:mk1", "--group", "memory")
    assert f"{ARGUMENTS['page_size'].arg.help} [unsupported]\n" in text
    assert " arguments on poor:mk1: " in text


HEAVY = {"torch", "numpy", "transformers", "asyncio", "rich", "yaml", "fastapi", "pydantic", "zmq", "psutil", "jinja2"}
OF_PLANS = {"msgspec", "importlib.metadata", "srv.args.resolve", "srv.args.statement", "srv.platform.facts", "tempfile"}
OF_MISTAKES = {"difflib", "srv.args.dialects", "srv.args.yaml", "srv.args.completion"}


@every(
    ("words", "too_much"),
    [
        ("args list", HEAVY | OF_MISTAKES | OF_PLANS),
        ("args explain port", HEAVY | OF_MISTAKES | OF_PLANS),
        ("launch --help", HEAVY | OF_MISTAKES | OF_PLANS),
        ("plan --help", HEAVY | OF_MISTAKES | OF_PLANS),
        ("plan --device npu:a3 --load-format dummy", HEAVY | OF_MISTAKES - {"difflib"}),
        ("plan --dialect rtp-llm --device npu:a3", HEAVY),
        ("--version", HEAVY),
    ],
)
def test_commands_import_only_what_they_need(words: str, too_much: set[str]) -> None:
    """The start-up time depends on the machine, but the imports do not."""
    code = (
        "import sys\n"
        "from srv.cli.main import main\n"
        "try:\n"
        f"    main({words.split()!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"found = sorted({too_much!r} & set(sys.modules))\n"
        "sys.exit(f'imported {found}' if found else 0)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr


def test_empty_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "list", "--status", "unsupported") == "0 arguments: none\n"


@every("words", [["--group", "nothing"], ["--status", "done"], ["--platform", "nowhere:x"], ["--platform", "poor:mk9"]])
def test_list_with_an_unknown_filter_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "list", *words]) == 2
    assert capsys.readouterr().err.startswith("srv: ")


EXPLAINED = {
    "schedule-policy": (
        "schedule_policy (schedule)\n"
        f"  {ARGUMENTS['schedule_policy'].arg.help}\n"
        "\n"
        "  flag                 --schedule-policy {fcfs,lpm}\n"
        "  environment          SRV_SCHEDULE_POLICY\n"
        "  config file          schedule_policy\n"
        "  type                 fcfs | lpm\n"
        "  default              fcfs\n"
        "  not yet: random      only fcfs and lpm are implemented so far\n"
        "  not yet: dfs-weight  only fcfs and lpm are implemented so far\n"
        "  not yet: lof         only fcfs and lpm are implemented so far\n"
    ),
    "cuda-graph-max-bs": (
        "graph_max_batch_size (graphs)\n"
        f"  {ARGUMENTS['graph_max_batch_size'].arg.help}\n"
        "\n"
        "  flag         --graph-max-batch-size, --cuda-graph-max-bs REQUESTS\n"
        "  environment  SRV_GRAPH_MAX_BATCH_SIZE\n"
        "  config file  graph_max_batch_size\n"
        "  type         int, at least 1\n"
        "  unit         requests\n"
        "  default      unset\n"
        "  needs        graphs\n"
    ),
    "enable-deepep-moe": (
        "enable_deepep_moe (experts)\n"
        f"  {DEPRECATED['enable_deepep_moe'].arg.help}\n"
        "\n"
        "  flag         --enable-deepep-moe\n"
        "  environment  SRV_ENABLE_DEEPEP_MOE\n"
        "  config file  enable_deepep_moe\n"
        "  type         bool\n"
        "  default      false\n"
        "  deprecated   use --moe-a2a-backend deepep instead\n"
    ),
}


@every(("name", "text"), EXPLAINED.items())
def test_explanations_word_for_word(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "explain", name) == text


@every("name", [*ARGUMENTS, *DEPRECATED])
def test_every_argument_can_be_explained_on_a_device(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(output(capsys, "explain", name, "--device", "imagined:mk1", "--json"))
    assert answer["name"] == name
    if name in ARGUMENTS:
        assert answer["on_device"]["provenance"].startswith(f"{name} = ")


SCHEMA = make_schema()


def test_schema_has_exactly_the_names_of_arguments() -> None:
    names = {name for argument in (*ARGUMENTS.values(), *DEPRECATED.values()) for name in argument.names}
    assert SCHEMA["properties"].keys() == names
    assert SCHEMA["additionalProperties"] is False
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def follow(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = SCHEMA["properties"][name]
    return SCHEMA["properties"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def obeys(value: Any, schema: dict[str, Any]) -> bool:
    """A validator for the few keywords that the schema uses; an unknown keyword is an error."""
    types = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list}
    keywords = {
        "type": lambda operand: (
            isinstance(value, types[operand]) and (operand == "boolean" or not isinstance(value, bool))
        ),
        "enum": lambda operand: value in operand,
        "const": lambda operand: value == operand,
        "minimum": lambda operand: value >= operand,
        "maximum": lambda operand: value <= operand,
        "exclusiveMinimum": lambda operand: value > operand,
        "exclusiveMaximum": lambda operand: value < operand,
        "anyOf": lambda operand: any(obeys(value, option) for option in operand),
        "minItems": lambda operand: len(value) >= operand,
        "items": lambda operand: all(obeys(part, operand) for part in value),
    }
    notes = {"description", "default", "examples", "deprecated"}
    return all(keywords[key](operand) for key, operand in schema.items() if key not in notes)


@every("name", [*ARGUMENTS, *DEPRECATED])
def test_schema_accepts_and_has_the_default(name: str) -> None:
    schema, argument = follow(name), find_argument_or_deprecated(name)
    assert argument is not None
    assert schema["description"].startswith(argument.arg.help)
    assert ("default" in schema) == (argument.default is not None)
    if "default" in schema:
        assert obeys(schema["default"], schema)


@every(
    ("line", "good"),
    [
        ("page_size: 16", True),
        ("page_size: 0", False),
        ("page_size: big", False),
        ("chunked_prefill_size: -1", True),
        ("chunked_prefill_size: 0", False),
        ("mem_fraction_static: 1.0", False),
        ("mem_fraction_static: 0.5", True),
        ("dtype: half", True),
        ("dtype: int8", False),
        ("disable_radix_cache: true", True),
        ("disable_radix_cache: 1", False),
        ("cuda_graph_bs: [1, 2]", True),
        ("cuda_graph_bs: [0]", False),
        ("cuda_graph_bs: []", False),
        ("lora_target_modules: [q_proj, v_proj]", True),
        ("lora_target_modules: [nothing]", False),
        ("max_lora_chunk_size: 17", False),
        ("max_lora_chunk_size: 32", True),
        ("speculative_algorithm: NGRAM", True),
        ("enable_ep_moe: false", True),
    ],
)
def test_schema_and_reader_agree(line: str, good: bool) -> None:
    ((key, value),) = yaml.safe_load(line).items()
    assert obeys(value, follow(key)) is good
    statements, rejections = read_text(line, Path("serve.yaml"))
    argument = find_argument_or_deprecated(key)
    assert argument is not None
    readable = not rejections and argument.validation_error(statements[0].value) is None
    assert readable is good


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "schema")) == SCHEMA


def complete(script: Path, line: str) -> set[str]:
    """The words that bash offers at the end of a line."""
    words = line.split(" ")
    code = (
        f"source {script}; COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _srv; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    process = subprocess.run([BASH, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return set(process.stdout.split())


BASH = shutil.which("bash") or ""


@pytest.mark.skipif(not BASH, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("srv la", {"launch"}),
        ("srv args ", {"explain", "list", "schema", "translate", "completion", "-h", "--help"}),
        ("srv args list --stat", {"--status"}),
        ("srv args list --status pl", {"planned"}),
        ("srv launch --page-s", {"--page-size"}),
        ("srv launch --dtype bf", {"bfloat16"}),
        ("srv launch --dtype b --page-s", {"--page-size"}),
        ("srv plan --cuda-graph-m", {"--cuda-graph-max-bs"}),
        ("srv launch --load-format dum", {"dummy"}),
        ("srv launch --sampling-backend py", {"pytorch"}),
        ("srv launch --dialect r", {"rtp-llm"}),
        ("srv args translate --from v", {"vllm"}),
    ],
)
def test_bash_completes(line: str, offered: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "srv.bash"
    script.write_text(output(capsys, "completion", "bash"))
    assert complete(script, line) == offered


@every("shell", ["bash", "zsh", "fish"])
def test_scripts_have_every_flag_of_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "completion", shell)
    for argument in (*ARGUMENTS.values(), *DEPRECATED.values()):
        flags = [
            flag for name, flag in zip(argument.names, argument.flags, strict=True) if name not in argument.old_names
        ]
        for flag in flags:
            shown = f"-l {flag[2:]}" if shell == "fish" else flag
            assert shown in text
    for command in ("launch", "plan", "platforms", "completion"):
        assert command in text


@every("shell", ["zsh", "fish"])
def test_quotes_in_scripts_are_balanced(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An odd number of quotes in a line would leave a string open."""
    text = output(capsys, "completion", shell)
    body = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in body if line.count("'") % 2 or line.count('"') % 2] == []


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "completion", "csh"]) == 2
    assert "[bad_command_line]" in capsys.readouterr().err


def test_the_guide_counts_the_arguments() -> None:
    planned = sum(bool(argument.arg.planned) for argument in ARGUMENTS.values())
    expected = (
        f"Of {len(ARGUMENTS) + len(DEPRECATED)} declared server arguments, {len(ARGUMENTS) - planned} are implemented,"
        f" {planned} are planned (setting one is refused) and {len(DEPRECATED)} are deprecated"
    )
    guide = Path(__file__).resolve().parents[3] / "docs" / "guides" / "arguments.md"
    assert expected in guide.read_text(encoding="utf-8").replace("\n", " ")

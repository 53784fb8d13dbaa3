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
from args_world import CAPABLE, backend, manifest

import srv.cli.platforms  # noqa: F401  bound to the real registry before a test puts another in its place
from srv.args.config import ARGUMENTS, DEPRECATED, GROUPS, find_any
from srv.args.schema import make_schema
from srv.args.yaml import read_text
from srv.cli.main import main
from srv.platform import registry
from srv.platform.facts import Support
from srv.platform.registry import Found

COUNT = len(ARGUMENTS) + len(DEPRECATED)


@pytest.fixture(autouse=True)
def _imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two platforms: "imagined", which can all, and "poor", which has no pages and forbids a policy."""
    rich = manifest(backend("plain", 1))
    poor = manifest(
        capabilities=CAPABLE - {"paged_kv"},
        support=(Support("schedule_conservativeness", "unsupported", "it is fixed there"),),
    )
    found = {
        name: Found(name, f"{name}-platform", "1.0", each, None) for name, each in [("imagined", rich), ("poor", poor)]
    }
    monkeypatch.setattr(registry, "find_platforms", lambda: found)
    monkeypatch.setattr(registry, "find_backends", lambda platform, family: ())


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["args", *words]) == 0
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(told(capsys, "list", "--json", *words))


@pytest.mark.parametrize("status", ["implemented", "planned", "deprecated"])
def test_list_by_status(status: str, capsys: pytest.CaptureFixture[str]) -> None:
    everything = (*ARGUMENTS.values(), *DEPRECATED.values())
    wanted = {argument.name for argument in everything if argument.status == status}
    answer = listed(capsys, "--status", status)
    assert {entry["name"] for entry in answer["arguments"]} == wanted
    assert answer["counts"]["status"] == {status: len(wanted)}
    assert f"{len(wanted)} arguments: {len(wanted)} {status}\n" in told(capsys, "list", "--status", status)


@pytest.mark.parametrize("group", GROUPS)
def test_list_by_group(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = listed(capsys, "--group", group)
    assert {entry["group"] for entry in answer["arguments"]} == {group}
    text = told(capsys, "list", "--group", group)
    assert text.startswith(f"{group}\n")
    assert all(f"  {entry['name']} " in text for entry in answer["arguments"])


def test_counts_by_status_and_platform(capsys: pytest.CaptureFixture[str]) -> None:
    counts = listed(capsys)["counts"]
    assert sum(counts["status"].values()) == COUNT
    assert counts["platforms"]["imagined:mk1"] == counts["status"]
    assert counts["platforms"]["poor:mk1"]["unsupported"] == 2
    assert sum(counts["platforms"]["poor:mk1"].values()) == COUNT


def test_list_on_a_platform_marks_what_it_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    answer = listed(capsys, "--platform", "poor:mk1", "--status", "unsupported")
    assert {entry["name"] for entry in answer["arguments"]} == {"page_size", "schedule_conservativeness"}
    text = told(capsys, "list", "--platform", "poor:mk1", "--group", "memory")
    assert "KV pool. [unsupported]\n" in text
    assert " arguments on poor:mk1: " in text


HEAVY = {"torch", "numpy", "transformers", "asyncio", "rich", "yaml", "fastapi", "pydantic", "zmq", "psutil", "jinja2"}
OF_PLANS = {"msgspec", "importlib.metadata", "srv.args.resolve", "srv.args.statement", "srv.platform.facts", "tempfile"}
OF_MISTAKES = {"difflib", "srv.args.dialects", "srv.args.yaml", "srv.args.completion"}


@pytest.mark.parametrize(
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
def test_nothing_is_imported_that_a_command_has_no_use_for(words: str, too_much: set[str]) -> None:
    """How long it takes would depend on the machine; what is imported does not."""
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_list_that_is_empty_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "list", "--status", "unsupported") == "0 arguments: none\n"


@pytest.mark.parametrize(
    "words", [["--group", "nothing"], ["--status", "done"], ["--platform", "nowhere:x"], ["--platform", "poor:mk9"]]
)
def test_list_of_what_does_not_exist_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "list", *words]) == 2
    assert capsys.readouterr().err.startswith("srv: ")


EXPLAINED = {
    "schedule-policy": (
        "schedule_policy (schedule)\n"
        "  Order of waiting requests: first come first served, longest cached prefix first, at random, by subtree of "
        "the prefix cache, or longest output first.\n"
        "\n"
        "  flag                 --schedule-policy {fcfs,lpm}\n"
        "  environment          SRV_SCHEDULE_POLICY\n"
        "  config file          schedule_policy\n"
        "  type                 fcfs | lpm\n"
        "  default              fcfs\n"
        "  not yet: random      only first come first served and longest prefix first are implemented yet\n"
        "  not yet: dfs-weight  only first come first served and longest prefix first are implemented yet\n"
        "  not yet: lof         only first come first served and longest prefix first are implemented yet\n"
    ),
    "cuda-graph-max-bs": (
        "graph_max_batch_size (graphs)\n"
        "  Largest batch of which a graph is captured; chosen by the device's memory if not set.\n"
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
        "  Old way to say --moe-a2a-backend deepep.\n"
        "\n"
        "  flag         --enable-deepep-moe\n"
        "  environment  SRV_ENABLE_DEEPEP_MOE\n"
        "  config file  enable_deepep_moe\n"
        "  type         bool\n"
        "  default      false\n"
        "  deprecated   say --moe-a2a-backend deepep instead\n"
    ),
}


@pytest.mark.parametrize(("name", "text"), EXPLAINED.items())
def test_explanations_word_for_word(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "explain", name) == text


@pytest.mark.parametrize("name", [*ARGUMENTS, *DEPRECATED])
def test_every_argument_can_be_explained_on_a_device(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(told(capsys, "explain", name, "--device", "imagined:mk1", "--json"))
    assert answer["name"] == name
    if name in ARGUMENTS:
        assert answer["on_device"]["story"].startswith(f"{name} = ")


SCHEMA = make_schema()


def test_schema_knows_every_name_and_no_other() -> None:
    names = {name for argument in (*ARGUMENTS.values(), *DEPRECATED.values()) for name in argument.names}
    assert SCHEMA["properties"].keys() == names
    assert SCHEMA["additionalProperties"] is False
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def follow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = SCHEMA["properties"][name]
    return SCHEMA["properties"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found


def obeys(value: Any, schema: dict[str, Any]) -> bool:
    """A validator for the few keywords that the schema uses; an unknown keyword is an error."""
    types = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list}
    laws = {
        "type": lambda law: isinstance(value, types[law]) and (law == "boolean" or not isinstance(value, bool)),
        "enum": lambda law: value in law,
        "const": lambda law: value == law,
        "minimum": lambda law: value >= law,
        "maximum": lambda law: value <= law,
        "exclusiveMinimum": lambda law: value > law,
        "exclusiveMaximum": lambda law: value < law,
        "anyOf": lambda law: any(obeys(value, each) for each in law),
        "minItems": lambda law: len(value) >= law,
        "items": lambda law: all(obeys(part, law) for part in value),
    }
    notes = {"description", "default", "examples", "deprecated"}
    return all(laws[key](law) for key, law in schema.items() if key not in notes)


@pytest.mark.parametrize("name", [*ARGUMENTS, *DEPRECATED])
def test_schema_takes_the_default_and_describes_it(name: str) -> None:
    schema, argument = follow(name), find_any(name)
    assert argument is not None
    assert schema["description"].startswith(argument.arg.help)
    assert ("default" in schema) == (argument.default is not None)
    if "default" in schema:
        assert obeys(schema["default"], schema)


@pytest.mark.parametrize(
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
    argument = find_any(key)
    assert argument is not None
    readable = not rejections and argument.against(statements[0].value) is None
    assert readable is good


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(told(capsys, "schema")) == SCHEMA


def complete(script: Path, line: str) -> set[str]:
    """What bash would offer at the end of a line."""
    words = line.split(" ")
    code = (
        f"source {script}; COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _srv; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run([BASH, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return set(done.stdout.split())


BASH = shutil.which("bash") or ""


@pytest.mark.skipif(not BASH, reason="no bash to complete in; install bash")
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
    script.write_text(told(capsys, "completion", "bash"))
    assert complete(script, line) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_hold_every_flag_of_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "completion", shell)
    for argument in (*ARGUMENTS.values(), *DEPRECATED.values()):
        flags = [
            flag for name, flag in zip(argument.names, argument.flags, strict=True) if name not in argument.old_names
        ]
        for flag in flags:
            shown = f"-l {flag[2:]}" if shell == "fish" else flag
            assert shown in text
    for command in ("launch", "plan", "platforms", "completion"):
        assert command in text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_quote_what_they_quote(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An odd number of quotes in a line would leave a word open."""
    text = told(capsys, "completion", shell)
    body = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in body if line.count("'") % 2 or line.count('"') % 2] == []


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "completion", "csh"]) == 2
    assert "[bad_command_line]" in capsys.readouterr().err

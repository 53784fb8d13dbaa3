"""Every command and snippet of the guides works.

`srv launch` is planned with the same arguments, which checks all but the machine; other `srv` commands run as they are.
Requests and Python snippets run on one real server.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_site import DOCS
from e2e_support import Server, served
from guide_commands import ADDRESS, NOT_RUN, Command, blocks, commands

from srv.cli.main import main
from srv.models.locate import locate
from srv_matrix.guides import fill
from srv_matrix.guides.endpoints import operations, read_examples
from srv_matrix.inventory import openapi

GUIDES = DOCS / "guides"
PAGES = sorted(GUIDES.glob("*.md"))
COMMANDS = [command for page in PAGES for command in commands(page)]
LONG = re.compile(r"--fit|doctor|--kernels")  # commands that take seconds
OURS = [
    pytest.param(
        command, id=f"{command.page}: {command.text}", marks=[pytest.mark.slow] if LONG.search(command.text) else []
    )
    for command in COMMANDS
    if command.program == "srv"
]
EXAMPLES = read_examples(GUIDES / "examples.toml")
# Files of the built-in page; what ends what another call has begun, or says that it has ended; what needs a mixture of
# experts, which the demo model is not.
WITHOUT_EXAMPLE: frozenset[str] = frozenset(
    {
        "GET /",
        "GET /ui/app.js",
        "GET /ui/state",
        "GET /ui/style.css",
        "POST /dump_expert_distribution_record",
        "POST /start_expert_distribution_record",
        "POST /stop_expert_distribution_record",
        "POST /v1/batches/{batch}/cancel",
        "POST /v1/responses/{response}/cancel",
    }
)
EARLIER_ID = re.compile(r"^id=ID  # of (.+)$", re.MULTILINE)
PRINT_ID = f"""{shlex.quote(sys.executable)} -c 'import json, sys; print(json.load(sys.stdin)["id"])'"""
# The server of these tests has none of these models; tests/e2e/test_e2e_pooled.py sends the same to one that has.
NEED_A_CLASSIFIER = {"POST /classify", "POST /v1/classify"}
SHELL = shutil.which("bash")
CURL = shutil.which("curl")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader: a model, the files of the guides, a key."""
    for name in ("serve.yaml", "srv.service"):
        shutil.copy(GUIDES / name, tmp_path)
    (tmp_path / "model.gguf").symlink_to(locate(None, None))
    (tmp_path / "key.txt").write_text("key-of-the-guide\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in [variable for variable in os.environ if variable.startswith("SRV_")]:
        monkeypatch.delenv(name)
    return tmp_path


def planned(words: list[str]) -> list[str]:
    """A launch as a plan; everything else as it is."""
    return ["plan", *words[1:]] if words[0] == "launch" else words


@pytest.mark.parametrize("command", OURS)
def test_commands_of_srv_succeed(command: Command, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(planned(shlex.split(command.text)[1:]))
    shown = capsys.readouterr()
    assert status == 0, shown.err + shown.out[-2000:]
    assert shown.out


def test_other_programs_are_known() -> None:
    assert {command.program for command in COMMANDS} - {"srv", "curl"} <= NOT_RUN.keys()


def test_the_unit_and_the_container_launch_what_a_plan_accepts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(folder / "srv.service")
    program, *words = shlex.split(unit["Service"]["ExecStart"].replace("/etc/srv/", f"{folder}/"))
    assert Path(program).name == "srv"
    assert main(planned(words)) == 0, capsys.readouterr().err
    text = (GUIDES / "Containerfile").read_text(encoding="utf-8")
    parts = [json.loads(found) for found in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE)]
    program, *words = [word.replace("/model.gguf", f"{folder}/model.gguf") for part in parts for word in part]
    assert Path(program).name == "srv"
    assert main(planned(words)) == 0, capsys.readouterr().err


def test_every_endpoint_has_an_example_and_a_section() -> None:
    names = {name for name, _ in operations(openapi())}
    assert names - EXAMPLES.keys() - WITHOUT_EXAMPLE == set(), "write examples in docs/guides/examples.toml"
    assert EXAMPLES.keys() <= names
    page = fill((GUIDES / "api.md").read_text(encoding="utf-8"), GUIDES)
    assert {f"## {name}" for name in names} <= set(page.splitlines())
    for name, example in EXAMPLES.items():
        path = re.sub(r"{\w+}", r"\\S+", name.split()[1])
        assert re.search(rf"{ADDRESS}{path}(\s|$)", example), f"the example of {name} calls another endpoint"


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(Exception, match="no part of the guides is called gone"):
        fill("<!-- generated: gone -->", GUIDES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    arguments = ("--is-embedding", "--max-total-tokens", "16384", "--file-storage-path", str(folder / "files"))
    with served(folder / "log", *arguments) as running:
        yield running


def with_earlier(command: str) -> str:
    """The command, with the example whose id it needs before it."""
    return EARLIER_ID.sub(lambda match: f"id=$({with_earlier(EXAMPLES[match[1]])} | {PRINT_ID})", command)


def test_an_earlier_example_gives_the_id() -> None:
    command = with_earlier(EXAMPLES["GET /v1/batches/{batch}"])
    assert "ID" not in re.sub(r"input_file_id", "", command)
    assert [command.count(f"{ADDRESS}{path}") for path in ("/v1/files", "/v1/batches", "/v1/batches/$id")] == [1, 2, 1]


REQUESTS = {f"{command.page}: {command.text}": command.text for command in COMMANDS if command.program == "curl"}


@pytest.mark.slow
@pytest.mark.skipif(CURL is None, reason="there is no curl binary here; install curl to run these tests")
@pytest.mark.parametrize("name", [*REQUESTS, *EXAMPLES])
def test_requests_succeed(name: str, server: Server) -> None:
    text = REQUESTS.get(name) or EXAMPLES[name]
    command = "set -e -o pipefail\n" + with_earlier(text).replace(ADDRESS, server.base)
    process = subprocess.run([str(SHELL), "-c", command], capture_output=True, text=True, timeout=120, check=False)
    if name in NEED_A_CLASSIFIER:
        assert "not_a_classifier" in process.stdout, process.stdout + process.stderr
        return
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_snippets_print_text(page: Path, server: Server) -> None:
    pytest.importorskip("openai", reason="the client is not installed; `make env` installs it")
    for snippet in blocks(page, "python"):
        process = subprocess.run(
            [sys.executable, "-c", snippet.replace(ADDRESS, server.base)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        assert process.stdout.strip()

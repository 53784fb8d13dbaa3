"""Refusals and explanations word for word, as the command line prints them (`args_golden.txt`).

Each block of the file is a command and what it prints; MODEL stands for a folder with a model's configuration and the
configuration file below. Who changes a text on purpose runs `python tests/core/test_args_golden.py`, which writes the
file anew, and reads the difference.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from args_world import CONFIG

from srv.cli.main import main

GOLDEN = Path(__file__).with_name("args_golden.txt")
FILE = """\
page_size: 16
page-size: 32
pagesize: 8
port: "80"
host: null
tp_size: 4
disable_radix_cache: 2026-01-01
"""
CODE = re.compile(r"\[([a-z_]+)\]$", re.MULTILINE)
# Codes of `srv.args` and `srv.cli` that no command line leads to: a rule of something planned, or a plugin at fault.
UNREACHABLE = {
    "defaults_disagree",
    "equal_backends",
    "excluded",
    "guesses_disagree",
    "not_divisible",
    "other_missing",
    "rank_missing",
    "too_few",
    "backends_disagree",
    "statement_raised",  # a plugin must be at fault
    "bad_text",  # no terminal shows it
    "host_unavailable",  # a socket must be refused, here and in the next
    "port_unavailable",
}


def said(command: str, folder: Path) -> str:
    """What a command prints, on either stream."""
    words = shlex.split(command.replace("MODEL", str(folder)))
    variables = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("SRV_")}
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), mock.patch.dict(os.environ, variables):
        status = main(words[len(variables) + 1 :])
    assert status == (0 if "srv: " not in out.getvalue() else 2)
    return out.getvalue().replace(str(folder), "MODEL").rstrip("\n")


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "serve.yaml").write_text(FILE)
    (folder / "eight").mkdir()  # the same model in 8 bits
    eight = {**CONFIG, "quantization_config": {"quant_method": "w8a8_int8"}}
    (folder / "eight" / "config.json").write_text(json.dumps(eight))
    return folder


def blocks() -> dict[str, str]:
    """Expected text by command."""
    found: dict[str, str] = {}
    for block in GOLDEN.read_text(encoding="utf-8").rstrip("\n").split("\n\n$ "):
        command, _, text = block.removeprefix("$ ").partition("\n")
        found[command] = text
    return found


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SRV_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("command", blocks())
def test_word_for_word(command: str, tmp_path: Path) -> None:
    assert said(command, make(tmp_path / "model")) == blocks()[command]


def codes() -> set[str]:
    """Every code that the sources of arguments and commands write down."""
    place = {"Rejected": 0, "_unknown": 0, "Constraint": 1, "reject": 1, "_fault": 2}  # of the code among what is given
    root = Path(__file__).resolve().parents[2] / "core/srv"
    sources = [*(root / "args").rglob("*.py"), *(root / "cli").glob("*.py")]
    found: set[str] = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            code = node.args[place[name]] if len(node.args) > place.get(name, 99) else None
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                found.add(code.value)
    return found


def test_every_code_that_can_be_met_is_in_the_file() -> None:
    known, shown = codes(), set(CODE.findall(GOLDEN.read_text(encoding="utf-8")))
    assert {"planned", "bad_value", "unknown_flag", "dtype_missing", "too_few"} <= known
    assert known - shown - UNREACHABLE == set()
    assert known >= UNREACHABLE


def write() -> None:
    """Write the file anew, of the commands that it holds."""
    with tempfile.TemporaryDirectory() as folder:
        place = make(Path(folder) / "model")
        text = "\n\n".join(f"$ {command}\n{said(command, place)}" for command in blocks())
    GOLDEN.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())

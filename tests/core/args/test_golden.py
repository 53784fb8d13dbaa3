"""Snapshot of refusals and explanations as the command line prints them (`args_golden.txt`).

Each block of the file is a command and its output; MODEL stands for a folder with a model's configuration and the
configuration file below, DESCRIPTION for that of an argument, whose words may change. After an intended change, run
`python tests/core/args/test_golden.py`, which rewrites the file, and review the diff.
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
from every import every

from srv.args.config import ARGUMENTS
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
DESCRIPTIONS = {argument.arg.help for argument in ARGUMENTS.values()}
# Codes of `srv.args` and `srv.cli` that no command line can cause: of planned features, or of faulty plugins.
UNREACHABLE = {
    "not_installed",  # needs an installation without the library
    "defaults_disagree",
    "equal_backends",
    "guesses_disagree",
    "rank_missing",
    "too_few",
    "backends_disagree",
    "statement_raised",  # needs a faulty plugin
    "bad_text",  # cannot be printed to a terminal
    "slower_path",  # needs a file of a type without kernels: tests/core/quantization/test_gguf_layers.py
    "loader_unfit",  # needs a package with a weight loader
    "module_missing",  # needs an embedding model with a file left out
    "no_integers",  # needs weights that are neither floats nor integers of 8 bits
    "folder_unusable",  # only a launch writes there
    "other_algorithm",  # needs a package with a drafter
    "recurrent_states",  # needs a model with recurrent layers: tests/core/args/test_backends.py
}


def output_of(command: str, folder: Path) -> str:
    """The output of a command on both streams."""
    words = shlex.split(command.replace("MODEL", str(folder)))
    variables = {word.partition("=")[0]: word.partition("=")[2] for word in words if word.startswith("SRV_")}
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), mock.patch.dict(os.environ, variables):
        status = main(words[len(variables) + 1 :])
    assert status == (0 if "srv: " not in out.getvalue() else 2)
    return without_descriptions(out.getvalue().replace(str(folder), "MODEL").rstrip("\n"))


def without_descriptions(text: str) -> str:
    return "\n".join("  DESCRIPTION" if line.strip() in DESCRIPTIONS else line for line in text.split("\n"))


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "serve.yaml").write_text(FILE)
    (folder / "eight").mkdir()  # the same model with 8-bit weights
    quantized = {**CONFIG, "quantization_config": {"quant_method": "w8a8_int8"}}
    (folder / "eight" / "config.json").write_text(json.dumps(quantized))
    (folder / "cls" / "1_Pooling").mkdir(parents=True)  # the same model with a pooling that is not supported
    (folder / "cls" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "cls" / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True})
    )
    (folder / "classes").mkdir()  # a classifier, with a module that is not supported
    classes = {**CONFIG, "architectures": ["LlamaForSequenceClassification"], "num_labels": 2}
    (folder / "classes" / "config.json").write_text(json.dumps(classes))
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.WordWeights"}]
    (folder / "classes" / "modules.json").write_text(json.dumps(modules))
    return folder


def blocks() -> dict[str, str]:
    """Expected text by command."""
    texts: dict[str, str] = {}
    for block in GOLDEN.read_text(encoding="utf-8").rstrip("\n").split("\n\n$ "):
        command, _, text = block.removeprefix("$ ").partition("\n")
        texts[command] = text
    return texts


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SRV_")]:
        monkeypatch.delenv(name)


@every("command", blocks())
def test_output_is_that_of_the_snapshot(command: str, tmp_path: Path) -> None:
    assert output_of(command, make(tmp_path / "model")) == blocks()[command]


def codes() -> set[str]:
    """Every code that occurs in the sources of arguments and commands."""
    place = {
        "Rejection": 0,
        "_unknown": 0,
        "Constraint": 1,
        "reject": 1,
        "_fault": 2,
    }  # position of the code among the arguments
    root = Path(__file__).resolve().parents[3] / "core/srv"
    sources = [*(root / "args").rglob("*.py"), *(root / "cli").glob("*.py")]
    actual: set[str] = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            code = node.args[place[name]] if len(node.args) > place.get(name, 99) else None
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                actual.add(code.value)
    return actual


def test_every_reachable_code_is_in_the_snapshot() -> None:
    reachable, shown = codes(), set(CODE.findall(GOLDEN.read_text(encoding="utf-8")))
    assert {"planned", "bad_value", "unknown_flag", "dtype_missing", "too_few"} <= reachable
    assert reachable - shown == UNREACHABLE


def write() -> None:
    """Rewrite the file for the commands that it contains."""
    with tempfile.TemporaryDirectory() as folder:
        place = make(Path(folder) / "model")
        text = "\n\n".join(f"$ {command}\n{output_of(command, place)}" for command in blocks())
    GOLDEN.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())

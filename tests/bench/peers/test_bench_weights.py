"""The quantized checkpoints that servers are compared on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import turns
import weights_race
from catalogue import Peer
from models_small import small_model
from packed_weights import SIZES
from rich.console import Console
from safetensors.torch import load_file
from weights_race import Result

from srv.models.read import read_facts
from srv.quantization.registry import method_of


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain"
    small_model("llama", **{**SIZES, "intermediate_size": 128}).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("form", "method", "tensor", "dtype"),
    [
        ("awq", "awq", "mlp.down_proj.qweight", torch.int32),
        ("w8a8", "w8a8_int8", "mlp.down_proj.weight", torch.int8),
    ],
)
def test_a_checkpoint_has_the_stated_method_and_the_files_of_the_plain_one(
    plain: Path, form: str, method: str, tensor: str, dtype: torch.dtype
) -> None:
    folder = weights_race.checkpoint(form, plain)
    stored = load_file(folder / "model.safetensors")
    assert (method_found := method_of(read_facts(folder))) is not None
    assert method_found.name == method
    assert stored[f"model.layers.0.{tensor}"].dtype == dtype
    assert {file.name for file in plain.iterdir()} == {file.name for file in folder.iterdir()}


def test_a_checkpoint_is_written_once(plain: Path) -> None:
    config = weights_race.checkpoint("awq", plain) / "config.json"
    written = config.stat().st_mtime_ns
    weights_race.checkpoint("awq", plain)
    assert config.stat().st_mtime_ns == written


def test_servers_load_the_checkpoint(tmp_path: Path) -> None:
    ours, theirs = weights_race.servers(weights_race.ENGINES, tmp_path)
    assert ours.arguments[-2:] == ("--model-path", str(tmp_path))
    assert theirs.arguments[theirs.arguments.index("serve") + 1] == str(tmp_path)


def test_the_table_has_the_ratio_and_leaves_out_what_a_server_did_not_do() -> None:
    results = {
        "awq": Result({"1 stream": {"srv": 30.0, "vllm": 20.0}}, {"srv": 50.0, "vllm": 51.0}),
        "w8a8": Result({"1 stream": {"srv": 40.0}}, {"srv": 52.0}),
    }
    console = Console(width=100)
    with console.capture() as captured:
        console.print(weights_race.table(results))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]
    assert rows == [
        ["awq", "1 stream", "30.0", "20.0", "1.50"],
        ["awq", "perplexity", "50.0", "51.0", ""],
        ["w8a8", "1 stream", "40.0", "–", ""],
        ["w8a8", "perplexity", "52.0", "–", ""],
    ]


def test_a_server_that_fails_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(turns, "LOGS", tmp_path)
    absent = Peer("absent", "vllm", "", "bf16", False, "Q4_1", ["/no/such/python"])
    (load, *_) = weights_race.LOADS
    assert turns.measure([absent], [load], 1, vocab=1000, finish=pytest.fail) == {load.name: {}}
    assert "absent: it cannot be started" in capsys.readouterr().err

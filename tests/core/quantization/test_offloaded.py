"""Quantized layers in host memory: their tensors are those that a plan counts, and the logits are the same."""

from __future__ import annotations

from pathlib import Path

from every import every
from offloaded_weights import CASES, check_offloaded


@every("name", CASES)
def test_logits_are_those_of_weights_on_the_device(name: str, tmp_path: Path) -> None:
    case, folder = CASES[name], tmp_path / name
    folder.mkdir()
    assert check_offloaded(case.write(folder), **case.arguments) >= case.ops

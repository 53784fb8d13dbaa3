"""GGUF files as llama.cpp's converter writes them: the logits of transformers, of each architecture that is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every import every
from gguf import GGMLQuantizationType as Kind
from gguf_cases import CASES, recorded, served_logits, write_gguf
from models_small import built, expected_logits, tokens_of
from planned_sizes import planned_bytes

from srv.models.families.registry import gguf_names
from srv.models.read import read_facts


@pytest.mark.slow
@every("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With the weights of the file, whose matrices stay in blocks; the file has as many as the checkpoint."""
    case = CASES[name]
    model, path = case.made(), tmp_path / "model.gguf"
    model.save_pretrained(tmp_path)
    write_gguf(name, tmp_path, path, Kind.Q8_0)
    model = type(model).from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    tokens, facts = tokens_of(model), read_facts(path)
    ours = built(path, impl="srv", dequantize=False, context_length=64)
    expected = expected_logits(model, tokens)
    torch.testing.assert_close(served_logits(ours, facts, tokens), expected, atol=2e-4, rtol=1e-4)
    checkpoint = read_facts(tmp_path)
    assert (facts.architecture, facts.parameters) == (checkpoint.architecture, checkpoint.parameters)
    assert ours.loaded_bytes() == planned_bytes(path, dequantize_weights=False)


def test_every_architecture_that_is_read_was_converted() -> None:
    converted = {each["metadata"]["general.architecture"] for each in recorded().values()}
    assert converted == set(gguf_names())

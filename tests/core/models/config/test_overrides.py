"""Fields of a configuration that the user replaces: RoPE's are read where a configuration stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from models_reference_ops import reference_ops
from models_small import HOST, edit_config, expected_logits, our_logits, small_model, tokens_of

from srv.errors import ModelError
from srv.models.build import build
from srv.models.choice import LayerOptions
from srv.models.layers.context import BuildContext
from srv.models.options import ReadOptions
from srv.models.read import read_facts

LINEAR = {"rope_type": "linear", "factor": 3.0}


@every(
    ("overrides", "expected"),
    [
        ({"rope_theta": 300.0}, {"rope_type": "default", "rope_theta": 300.0}),
        ({"rope_scaling": LINEAR}, {**LINEAR, "rope_theta": 500.0}),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 70.0}, {**LINEAR, "rope_theta": 70.0}),
        ({"rope_parameters": {**LINEAR, "rope_theta": 90.0}}, {**LINEAR, "rope_theta": 90.0}),
    ],
)
def test_rope_of_both_implementations_has_the_other_values(
    overrides: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """For a configuration saved by transformers 5, and as earlier versions saved it."""
    model = small_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}, num_hidden_layers=2)
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    model.save_pretrained(folder)
    changed = type(model.config).from_dict({**model.config.to_dict(), "rope_parameters": expected})
    other = type(model)._from_config(changed, attn_implementation="eager", dtype=torch.float32).eval()
    other.load_state_dict(model.state_dict())
    tokens = tokens_of(model)
    wanted = expected_logits(other, tokens)
    assert not torch.allclose(wanted, expected_logits(model, tokens), atol=1e-2)
    assert "rope_parameters" in json.loads((folder / "config.json").read_text())
    for fields in ({}, {"rope_parameters": None, "rope_theta": 500.0}):
        edit_config(folder, **fields)
        facts = read_facts(folder, ReadOptions(overrides))
        for impl in ("srv", "transformers"):
            ours = build(facts, LayerOptions(impl), BuildContext(HOST, torch.float32, reference_ops()))
            torch.testing.assert_close(our_logits(ours, tokens), wanted, atol=3e-4, rtol=1e-3)


def test_a_part_of_each_head_is_rotated_as_overridden(tmp_path: Path) -> None:
    model = small_model("qwen3_next")
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert stored["partial_rotary_factor"] == 0.5
    config = read_facts(tmp_path, ReadOptions({"partial_rotary_factor": 0.25})).config
    assert config["rope_parameters"] == {**stored, "partial_rotary_factor": 0.25}


def test_nested_rope_parameters_have_the_other_values(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    edit_config(tmp_path, text_config={"rope_parameters": stored})
    facts = read_facts(tmp_path, ReadOptions({"rope_theta": 300.0}))
    assert facts.config["text_config"]["rope_parameters"] == {**stored, "rope_theta": 300.0}


def test_one_value_for_parameters_of_several_kinds_is_refused(tmp_path: Path) -> None:
    small_model("gemma3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'rope_theta' in --json-model-override-args is one value") as error:
        read_facts(tmp_path, ReadOptions({"rope_theta": 300.0}))
    assert (error.value.code, error.value.remedy) == ("unsupported_config", "Override rope_parameters as a whole")

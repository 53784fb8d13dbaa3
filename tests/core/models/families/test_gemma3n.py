"""Gemma 3n: logits and sizes are those of transformers, and no field is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bfloat16_models import MODELS
from every import every
from model_cells import random_model
from models_small import built, edit_config, expected_logits, our_logits, tokens_of
from planned_sizes import check_sizes
from thread_ranks import on_ranks

from srv.models import derive
from srv.models.facts.special_layers import special_layers
from srv.models.families.trees import native_tree
from srv.models.read import read_facts
from srv.models.unsupported import UnsupportedConfig

NAME = "Gemma3nForCausalLM"
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "biases, untied, sizes of layers": {
        "attention_bias": True,
        "tie_word_embeddings": False,
        "intermediate_size": [96, 64, 96, 32, 96],
        "final_logit_softcapping": 3.0,
    },
    "another active stream, no scale": {"altup_active_idx": 1, "altup_correct_scale": False},
    "own caches, kinds and sparsity by default": {
        "num_kv_shared_layers": 0,
        "layer_types": None,
        "activation_sparsity_pattern": None,
    },
    "rotary embeddings of both kinds": {"rope_parameters": ROPE, "num_key_value_heads": 1},
}


def random_gemma(**fields: Any) -> Any:
    return random_model("gemma3n_text", **{**MODELS[NAME].fields, **fields})


@every("case", CASES)
def test_logits_and_sizes_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = random_gemma(**CASES[case])
    model.save_pretrained(tmp_path)
    ours, facts, tokens = built(tmp_path, impl="srv"), read_facts(tmp_path), tokens_of(model)
    torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-4)
    tree = native_tree(facts.architecture, facts.config)
    assert derive.parameters(tree) == sum(each.numel() for each in model.parameters()) == facts.parameters
    check_sizes(tmp_path, ours)


def test_layers_that_read_a_lower_cache_have_none(tmp_path: Path) -> None:
    random_gemma().save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    assert [group.layers for group in facts.cache_groups] == [(1,), (0, 2)]
    places = {0: (1, 0), 1: (0, 0), 2: (1, 1)}
    ours = built(tmp_path, impl="srv", cache_places=places)
    assert [(layer.group, layer.index) for layer in ours.attention_layers] == [places[0], places[1], places[2]]
    reading = [each.layer for each in ours.modules() if type(each).__name__ == "ReadingAttention"]
    assert [(layer.group, layer.index) for layer in reading] == [places[2], places[1]]
    assert special_layers(facts).inputs is not None  # the budget counts them


def test_ranks_compute_the_same_logits(tmp_path: Path) -> None:
    """Mean and standard deviation of sparse gates are those of both."""
    model = random_gemma(vocab_size=96)
    model.save_pretrained(tmp_path)
    tokens = tokens_of(model)
    parts = on_ranks(
        2, lambda group, comm: our_logits(built(tmp_path, impl="srv", group=group, communicator=comm), tokens)
    )
    for logits in parts:
        torch.testing.assert_close(logits, expected_logits(model, tokens), atol=2e-4, rtol=1e-4)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"hidden_activation": "relu"}, "hidden_activation = 'relu' is not implemented"),
    ({"altup_active_idx": 3}, "altup_active_idx = 3 is none of 3 streams"),
    ({"intermediate_size": [96, 64]}, "intermediate_size has 2 entries for 5 layers"),
    ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 entries for 5 layers"),
    ({"activation_sparsity_pattern": [1.0] * 5}, "has a value that is no share of the gates"),
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5 of 5 layers is not possible"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 leaves layer 1 no lower one of its kind"),
)


@every("case", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(case: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    fields, reason = case
    random_gemma().config.save_pretrained(tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(UnsupportedConfig) as raised:
        native_tree(NAME, json.loads((tmp_path / "config.json").read_text()))
    assert reason in str(raised.value)

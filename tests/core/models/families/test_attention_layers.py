"""The attention layers that facts describe are those that the built model has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from engine_small import FIELDS
from models_small import SIZES, built, randomized, small_model
from transformers import AutoConfig, AutoModelForCausalLM

from srv.models.facts.attention_layers import attention_layers
from srv.models.facts.sharding import rank_facts
from srv.models.read import read_facts


def test_native_models(tmp_path: Path) -> None:
    for kind in ("mistral", "qwen2", "smollm3", "gemma3", "granite"):
        small_model(kind, **FIELDS[kind]).save_pretrained(tmp_path / kind)
        facts = read_facts(tmp_path / kind)
        layers = [replace(layer, index=0) for layer in attention_layers(facts)]
        assert layers == [replace(layer, index=0, group=0) for layer in built(tmp_path / kind).attention_layers]


def test_models_through_transformers(tmp_path: Path) -> None:
    """All but the attention scale, which no fact tells."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("vaultgemma", **{**SIZES, **FIELDS["vaultgemma"]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomized(model).save_pretrained(tmp_path)
    layers = attention_layers(read_facts(tmp_path))
    assert [layer.window for layer in layers] == [5, None, 5]
    assert [replace(layer, scale=1.0) for layer in layers] == [
        replace(layer, scale=1.0) for layer in built(tmp_path).attention_layers
    ]


def test_heads_are_those_of_one_rank(tmp_path: Path) -> None:
    small_model("llama", num_attention_heads=8, num_key_value_heads=2).save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    sizes = {(layer.heads, layer.kv_heads) for ranks in (1, 2) for layer in attention_layers(rank_facts(facts, ranks))}
    assert sizes == {(8, 2), (4, 1)}


def test_window_without_kinds_of_layers_may_be_that_of_all(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    config = {**facts.config, "sliding_window": 7, "attn_logit_softcapping": 30}
    other = replace(facts, architecture="UnknownForCausalLM", config=config)
    assert {(layer.window, layer.soft_cap) for layer in attention_layers(other)} == {(7, 30.0)}
    unused = replace(other, config={**config, "use_sliding_window": False})
    assert {layer.window for layer in attention_layers(unused)} == {None}

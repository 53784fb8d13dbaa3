"""What the fields of a configuration tell of the layers of a model without native layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srv.errors import ModelError
from srv.models.config.layer_fields import Heads, cache_groups, common_heads
from srv.models.read import read_facts
from srv.specs import FullAttention, SlidingWindow

FIELDS: dict[str, Any] = {
    "architectures": ["OddForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({}, (6, 8)),
        ({"num_key_value_heads": 2, "head_dim": 16}, (2, 16)),
        ({"multi_query": True}, (1, 8)),
        ({"attn_config": {"kv_n_heads": 3}}, (3, 8)),
        ({"model_type": "jetmoe", "num_key_value_heads": 2}, (6, 8)),
        ({"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 16}, (6, 16)),
    ],
)
def test_heads(fields: dict[str, Any], heads: tuple[int, int]) -> None:
    assert common_heads(fields, hidden_size=48, heads=6) == heads


@pytest.mark.parametrize(
    "own",
    [
        {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        {"per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}},
    ],
)
def test_layers_with_heads_of_their_own_are_a_group(own: dict[str, Any]) -> None:
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, **own}
    assert cache_groups(fields, 2, Heads(2, 8), 256) == (
        FullAttention((1,), 1, 16, 16),
        SlidingWindow((0,), 2, 8, 8, 5),
    )


def read(folder: Path, **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**FIELDS, **fields}))
    return read_facts(folder)


def test_positions_that_only_padding_has_shorten_the_context(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="odd").context_length == 256
    assert read(tmp_path, model_type="roberta", pad_token_id=1).context_length == 254


def test_a_count_may_be_stated_per_layer(tmp_path: Path) -> None:
    assert read(tmp_path, intermediate_size=[80, 96]).layers == 2
    with pytest.raises(ModelError, match="intermediate_size"):
        read(tmp_path, intermediate_size=[80, "many"])


def test_layers_may_be_counted_by_their_kinds(tmp_path: Path) -> None:
    assert read(tmp_path, num_hidden_layers=None, layer_types=3 * ["full_attention"]).layers == 3
    nemotron = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_key_value_heads": 2}
    assert read(tmp_path, **nemotron, num_hidden_layers=None, hybrid_override_pattern="M-*M").layers == 4


def test_the_last_layers_may_have_no_cache(tmp_path: Path) -> None:
    facts = read(tmp_path, num_hidden_layers=4, num_kv_shared_layers=1)
    assert (facts.layers, [group.layers for group in facts.cache_groups]) == (4, [(0, 1, 2)])


def test_decoders_of_encoder_decoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="belongs to an encoder-decoder") as caught:
        read(tmp_path, decoder_layers=2)
    assert caught.value.code == "unsupported_config"

"""Sharded models: each rank loads exactly its slices, and all ranks together compute what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from gguf import GGMLQuantizationType as Kind
from model_cells import random_model
from models_small import GRANITE, built, our_logits, small_model, tokens_of, write_gguf
from thread_ranks import on_ranks, part_of

from srv.dist.group import RankGroup
from srv.dist.mesh import Mesh
from srv.errors import ModelError
from srv.models.base import CausalLM
from srv.models.facts.sharding import divisions, rank_facts, rank_share
from srv.models.read import read_facts

# Eight query heads; two KV heads, so that four ranks hold copies.
SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}


def folder(tmp_path: Path, kind: str, **fields: Any) -> Path:
    small_model(kind, **{**SIZES, **fields}).save_pretrained(tmp_path)
    return tmp_path


def saved_random(tmp_path: Path, kind: str, **fields: Any) -> Path:
    random_model(kind, **{**SIZES, **fields}).save_pretrained(tmp_path)
    return tmp_path


def gguf_file(tmp_path: Path, kind: Kind, **fields: Any) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(path, small_model("llama", **{**SIZES, **fields}), "llama", kind)
    return path


CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "safetensors": (lambda path: folder(path, "qwen3"), {}),
    "safetensors with biases": (lambda path: folder(path, "llama", attention_bias=True, mlp_bias=True), {}),
    "tied embeddings": (lambda path: folder(path, "qwen2", tie_word_embeddings=True), {}),
    "GGUF in float16": (lambda path: gguf_file(path, Kind.F16), {}),
    "GGUF dequantized": (lambda path: gguf_file(path, Kind.Q8_0, tie_word_embeddings=True), {}),
    "GGUF in blocks": (lambda path: gguf_file(path, Kind.Q4_1), {"dequantize": False}),
    "GGUF in blocks, tied": (
        lambda path: gguf_file(path, Kind.Q8_0, tie_word_embeddings=True),
        {"dequantize": False},
    ),
    "multipliers": (lambda path: folder(path, "granite", **GRANITE), {}),
    "layers without RoPE": (lambda path: folder(path, "smollm3", no_rope_layer_interval=2), {}),
    "norms after each part": (lambda path: folder(path, "gemma3", sliding_window_pattern=2, attention_bias=True), {}),
    "norms over all heads": (lambda path: saved_random(path, "olmo2", pad_token_id=0), {}),
    "norms over all heads beside experts": (
        lambda path: saved_random(
            path, "olmoe", pad_token_id=0, num_experts=4, num_experts_per_tok=2, clip_qkv=2.0, head_dim=8
        ),
        {},
    ),
    "norms of each head": (lambda path: saved_random(path, "cohere", use_qk_norm=True, pad_token_id=0), {}),
    "norms of each head in parts": (lambda path: saved_random(path, "stablelm", qk_layernorm=True, head_dim=8), {}),
    "random weights": (lambda path: folder(path, "llama"), {"load_format": "dummy", "seed": 3}),
}


def sharded(path: Path, ranks: int, run: Callable[[CausalLM], Any], **options: Any) -> list[Any]:
    """The results of `run` on the parts of a model, all ranks together."""
    return on_ranks(ranks, lambda group, comm: run(built(path, group=group, communicator=comm, **options)))


@every("case", list(CASES))
def test_ranks_hold_slices_and_compute_the_same_logits(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    path = make(tmp_path)
    one = built(path, **options)
    tokens, views = tokens_of(small_model("llama", **SIZES), 12), one.weight_views()
    expected = our_logits(one, tokens)
    for ranks in (2, 4):
        parts = sharded(path, ranks, lambda model: (model, our_logits(model, tokens)), **options)
        for model, logits in parts:
            slices = model.weight_slices()
            own = model.weight_views()
            assert own.keys() == views.keys()
            assert all(torch.equal(own[name], part_of(views[name], slices.get(name))) for name in own)
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
            assert torch.equal(logits, parts[0][1]), "ranks sample from different logits"


def test_heads_of_a_rank_belong_together(tmp_path: Path) -> None:
    """Query heads 4 to 7 attend to KV head 1: ranks 2 and 3 of four hold copies of it."""
    path = folder(tmp_path, "llama")
    for rank, model in enumerate(sharded(path, 4, lambda model: model)):
        slices, prefix = model.weight_slices(), "model.layers.0.self_attn"
        assert slices[f"{prefix}.q_proj.weight"][1:3] == (rank * 64, rank * 64 + 64)
        for name in ("k_proj", "v_proj"):
            assert slices[f"{prefix}.{name}.weight"][1:3] == (rank // 2 * 32, rank // 2 * 32 + 32)
        attention = model.stack[0].attention.layer
        assert (attention.heads, attention.kv_heads) == (2, 1)


@every(("ranks", "kv_heads"), [(1, 2), (2, 1), (4, 1), (8, 1)])
def test_what_a_rank_holds_is_what_its_facts_say(ranks: int, kv_heads: int, tmp_path: Path) -> None:
    path = folder(tmp_path, "qwen3", vocab_size=96)
    facts = read_facts(path)
    own = rank_facts(facts, ranks)
    assert (own.heads, own.kv_heads, own.cache_groups[0].kv_heads) == (8 // ranks, kv_heads, kv_heads)
    loaded = sharded(path, ranks, lambda model: model.loaded_bytes()) if ranks > 1 else [built(path).loaded_bytes()]
    assert loaded == [round(facts.parameters * 4 * rank_share(facts, Mesh(ranks)))] * ranks


@every(
    ("fields", "ranks", "obstacle"),
    [
        ({}, 3, "its 8 attention heads are not a multiple of 3"),
        (
            {"num_key_value_heads": 8, "num_attention_heads": 24, "hidden_size": 96},
            3,
            "its 8 KV heads can neither be divided",
        ),
        ({"intermediate_size": 126}, 4, "its 126 units of intermediate size are not a multiple of 4"),
        ({"vocab_size": 98}, 4, "its 98 tokens of vocabulary are not a multiple of 4"),
    ],
)
def test_obstacles(fields: dict[str, Any], ranks: int, obstacle: str, tmp_path: Path) -> None:
    sizes = divisions(read_facts(folder(tmp_path, "llama", **fields)), in_blocks=False)
    assert not isinstance(sizes, str)
    assert any(obstacle in clause for clause in sizes.obstacles(Mesh(ranks)))
    assert ranks not in sizes.legal_ranks()


def test_quantization_blocks_are_not_split(tmp_path: Path) -> None:
    facts = read_facts(gguf_file(tmp_path, Kind.Q8_0, intermediate_size=96))
    sizes = divisions(facts, in_blocks=True)
    assert not isinstance(sizes, str)
    assert sizes.obstacles(Mesh(2)) == ["a rank's 48 columns of down_proj are not whole quantization blocks of 32"]
    dequantized = divisions(facts, in_blocks=False)
    assert not isinstance(dequantized, str)
    assert dequantized.obstacles(Mesh(2)) == []


def test_only_native_layers_are_sharded(tmp_path: Path) -> None:
    path = folder(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4}, hidden_act="gelu")
    assert "only models with native layers can be sharded (hidden_act" in str(
        divisions(read_facts(path), in_blocks=False)
    )
    with pytest.raises(ModelError, match="it cannot be sharded over 2 ranks") as raised:
        built(path, group=RankGroup(size=2))
    assert raised.value.code == "unsupported_sharding"

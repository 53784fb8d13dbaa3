"""Families with a vision tower beside their language model, which has native layers. The tower caches nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from srv.models.blueprint import Linear, Output, Part, Table, Tensors, walk
from srv.models.blueprint.without_layers import Group
from srv.models.derive import stack
from srv.models.families import llama4 as native_llama4
from srv.models.families import qwen3_moe
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import layer_norm
from srv.models.families.family import Family, Fields
from srv.models.families.native import known_tree


def _area(value: int | list[int]) -> int:
    """That of a patch or an image, which is a square if one size is given."""
    return math.prod(value) if isinstance(value, list) else value**2


def _two_layers(up: str, down: str, inputs: int, inner: int, outputs: int) -> tuple[Linear, Linear]:
    return Linear({up: inner}, inputs, bias=True), Linear({down: outputs}, inner, bias=True)


def qwen3_vl_moe(c: Fields) -> Part:
    text = {**QWEN3_TEXT, **c.text(), "tie_word_embeddings": c.tie_word_embeddings}
    tower = _qwen3_tower(Fields({**QWEN3_VISION, **c.tower()}))
    model = known_tree(qwen3_moe.ARCHITECTURE.name, text)
    body = dataclasses.replace(stack(model), name="model.language_model")
    output = next(part for _, part in walk(model) if isinstance(part, Output))
    return Group((Group(tower, name="model.visual"), body, output))


def _qwen3_tower(v: Fields) -> tuple[Part, ...]:
    """With features of several depths, each through a merger of its own."""
    hidden, inner, merged = v.hidden_size, v.intermediate_size, v.hidden_size * v.spatial_merge_size**2
    patch = (hidden, v.in_channels, v.temporal_patch_size, _area(v.patch_size))
    block = Group(
        (
            Group((Linear({"qkv": 3 * hidden, "proj": hidden}, hidden, bias=True),), name="attn"),
            Group(_two_layers("linear_fc1", "linear_fc2", hidden, inner, hidden), name="mlp"),
            *(layer_norm(hidden, name) for name in ("norm1", "norm2")),
        )
    )
    last = _two_layers("linear_fc1", "linear_fc2", merged, merged, v.out_hidden_size)
    deep = Group((layer_norm(merged, "norm"), *last))
    return (
        Tensors({"patch_embed.proj.weight": patch, "patch_embed.proj.bias": (hidden,)}),
        Table(v.num_position_embeddings, hidden, name="pos_embed"),
        *(dataclasses.replace(block, name=f"blocks.{index}") for index in range(v.depth)),
        Group((layer_norm(hidden, "norm"), *last), name="merger"),
        *(
            dataclasses.replace(deep, name=f"deepstack_merger_list.{index}")
            for index in range(len(v.deepstack_visual_indexes))
        ),
    )


def llama4(c: Fields) -> Part:
    v, text = Fields({**LLAMA4_VISION, **c.tower()}), c.text()
    model = known_tree(native_llama4.ARCHITECTURE.name, text)
    projector = Linear({"multi_modal_projector.linear_1": stack(model).embedding.size}, v.vision_output_dim)
    return Group(
        (Group(_llama4_tower(v), name="vision_model"), projector, dataclasses.replace(model, name="language_model"))
    )


def _llama4_tower(v: Fields) -> tuple[Part, ...]:
    hidden, inner, area = v.hidden_size, v.intermediate_size, _area(v.patch_size)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    block = Group(
        (
            Group((Linear(dict.fromkeys(names, hidden), hidden, bias=True),), name="self_attn"),
            Group(_two_layers("fc1", "fc2", hidden, inner, hidden), name="mlp"),
            *(layer_norm(hidden, name) for name in (parts.BEFORE_MIXER, parts.BEFORE_MLP)),
        )
    )
    return (
        Linear({"patch_embedding.linear": hidden}, v.num_channels * area),
        Tensors({"class_embedding": (hidden,), "positional_embedding_vlm": (_area(v.image_size) // area + 1, hidden)}),
        *(dataclasses.replace(block, name=f"model.layers.{index}") for index in range(v.num_hidden_layers)),
        *(layer_norm(hidden, name) for name in ("layernorm_pre", "layernorm_post")),
        Linear({"vision_adapter.mlp.fc1": v.projector_input_dim}, inner),
        Linear({"vision_adapter.mlp.fc2": v.projector_output_dim}, v.projector_output_dim),
    )


QWEN3_TEXT: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None, "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
}  # fmt: skip
QWEN3_VISION: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "in_channels": 3, "num_position_embeddings": 2304,
    "out_hidden_size": 3584, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "deepstack_visual_indexes": (8, 16, 24),
}  # fmt: skip
LLAMA4_VISION: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_channels": 3, "image_size": 448,
    "patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 7680,
}  # fmt: skip
_NESTED = {"text_config": None, "vision_config": None, "tie_word_embeddings": False}
QWEN3_VL = Family("qwen3_vl_moe", qwen3_vl_moe, _NESTED, text={**qwen3_moe.ARCHITECTURE.defaults, **QWEN3_TEXT})
_LLAMA4_TEXT = native_llama4.ARCHITECTURE
LLAMA4 = Family("llama4", llama4, _NESTED, text=_LLAMA4_TEXT.defaults, weights=_LLAMA4_TEXT.weights)

"""Qwen3-VL with experts: a vision tower beside the language model, which has native layers.

Its sizes alone are known. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Linear, Output, Part, Table, Tensors, walk
from srv.models.blueprint.without_layers import Group
from srv.models.derive import stack
from srv.models.families import qwen3_moe
from srv.models.families.architecture import Architecture
from srv.models.families.builders.vision import square, text_fields, tower_fields, two_layers
from srv.models.families.builders.without_layers import layer_norm
from srv.models.families.trees import tree_without_computation


def qwen3_vl_moe(c: Mapping[str, Any]) -> Part:
    text = {**QWEN3_TEXT, **text_fields(c), "tie_word_embeddings": c["tie_word_embeddings"]}
    tower = _qwen3_tower({**QWEN3_VISION, **tower_fields(c)})
    model = tree_without_computation(qwen3_moe.ARCHITECTURE, text)
    body = dataclasses.replace(stack(model), name="model.language_model")
    output = next(part for _, part in walk(model) if isinstance(part, Output))
    return Group((Group(tower, name="model.visual"), body, output))


def _qwen3_tower(v: Mapping[str, Any]) -> tuple[Part, ...]:
    """With features of several depths, each through a merger of its own."""
    hidden, inner, merged = v["hidden_size"], v["intermediate_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    patch = (hidden, v["in_channels"], v["temporal_patch_size"], square(v["patch_size"]))
    block = Group(
        (
            Group((Linear({"qkv": 3 * hidden, "proj": hidden}, hidden, bias=True),), name="attn"),
            Group(two_layers("linear_fc1", "linear_fc2", hidden, inner, hidden), name="mlp"),
            *(layer_norm(hidden, name) for name in ("norm1", "norm2")),
        )
    )
    last = two_layers("linear_fc1", "linear_fc2", merged, merged, v["out_hidden_size"])
    deep = Group((layer_norm(merged, "norm"), *last))
    return (
        Tensors({"patch_embed.proj.weight": patch, "patch_embed.proj.bias": (hidden,)}),
        Table(v["num_position_embeddings"], hidden, name="pos_embed"),
        *(dataclasses.replace(block, name=f"blocks.{index}") for index in range(v["depth"])),
        Group((layer_norm(hidden, "norm"), *last), name="merger"),
        *(
            dataclasses.replace(deep, name=f"deepstack_merger_list.{index}")
            for index in range(len(v["deepstack_visual_indexes"]))
        ),
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
_NESTED = {"text_config": None, "vision_config": None, "tie_word_embeddings": False}
ARCHITECTURE = Architecture(
    name="Qwen3VLMoeForConditionalGeneration",
    tree=qwen3_vl_moe,
    defaults=_NESTED,
    layers=None,
    model_type="qwen3_vl_moe",
    text_defaults={**qwen3_moe.ARCHITECTURE.defaults, **QWEN3_TEXT},
)

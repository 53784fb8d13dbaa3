"""Llama 4, whole: a vision tower beside the language model, which has native layers.

Its sizes alone are known. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Linear, Part, Tensors
from srv.models.blueprint.without_layers import Group
from srv.models.derive import stack
from srv.models.families import llama4 as native_llama4
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.vision import square, text_fields, tower_fields, two_layers
from srv.models.families.builders.without_layers import layer_norm
from srv.models.families.trees import tree_without_computation


def llama4(c: Mapping[str, Any]) -> Part:
    v, text = {**LLAMA4_VISION, **tower_fields(c)}, text_fields(c)
    model = tree_without_computation(native_llama4.ARCHITECTURE, text)
    projector = Linear({"multi_modal_projector.linear_1": stack(model).embedding.size}, v["vision_output_dim"])
    return Group(
        (Group(_llama4_tower(v), name="vision_model"), projector, dataclasses.replace(model, name="language_model"))
    )


def _llama4_tower(v: Mapping[str, Any]) -> tuple[Part, ...]:
    hidden, inner, area = v["hidden_size"], v["intermediate_size"], square(v["patch_size"])
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    block = Group(
        (
            Group((Linear(dict.fromkeys(names, hidden), hidden, bias=True),), name="self_attn"),
            Group(two_layers("fc1", "fc2", hidden, inner, hidden), name="mlp"),
            *(layer_norm(hidden, name) for name in (parts.BEFORE_MIXER, parts.BEFORE_MLP)),
        )
    )
    return (
        Linear({"patch_embedding.linear": hidden}, v["num_channels"] * area),
        Tensors(
            {"class_embedding": (hidden,), "positional_embedding_vlm": (square(v["image_size"]) // area + 1, hidden)}
        ),
        *(dataclasses.replace(block, name=f"model.layers.{index}") for index in range(v["num_hidden_layers"])),
        *(layer_norm(hidden, name) for name in ("layernorm_pre", "layernorm_post")),
        Linear({"vision_adapter.mlp.fc1": v["projector_input_dim"]}, inner),
        Linear({"vision_adapter.mlp.fc2": v["projector_output_dim"]}, v["projector_output_dim"]),
    )


LLAMA4_VISION: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_channels": 3, "image_size": 448,
    "patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 7680,
}  # fmt: skip
_NESTED = {"text_config": None, "vision_config": None, "tie_word_embeddings": False}
_LLAMA4_TEXT = native_llama4.ARCHITECTURE
ARCHITECTURE = Architecture(
    name="Llama4ForConditionalGeneration",
    tree=llama4,
    defaults=_NESTED,
    layers=None,
    model_type="llama4",
    weights=_LLAMA4_TEXT.weights,
    text_defaults=_LLAMA4_TEXT.defaults,
    runs_through_transformers=False,
)

"""Hunyuan, dense and with experts: norms of heads. Its sizes alone are known. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, experts, sizes, uniform


def hunyuan(c: Mapping[str, Any]) -> Part:
    base = sizes(c)
    return uniform(
        base, parts.attention(base, norms=parts.head_norms(base), bias=bool(c["attention_bias"])), parts.mlp(base)
    )


DENSE = Architecture(
    name="HunYuanDenseV1ForCausalLM",
    tree=hunyuan,
    defaults=common(290943, 4096, 11008, 32, 32, None, 2048),
    layers=None,
    model_type="hunyuan_v1_dense",
)


def hunyuan_moe(c: Mapping[str, Any]) -> Part:
    """The number of experts that a token uses may differ per layer."""
    base = sizes(c)
    used = c["moe_topk"] if isinstance(c["moe_topk"], list) else [c["moe_topk"]] * base.layers
    shared = parts.mlp(base, name="shared_mlp")
    mixer = parts.attention(base, norms=parts.head_norms(base), bias=bool(c["attention_bias"]))

    def layer(used: int) -> Layer:
        moe = experts(base, c["num_experts"], base.intermediate_size, used, router="gate.wg")
        return parts.pre_norm(base, mixer, dataclasses.replace(moe, shared=shared))

    return parts.decoder(base, alike(used[: base.layers], layer))


MOE = Architecture(
    name="HunYuanMoEV1ForCausalLM",
    tree=hunyuan_moe,
    defaults=common(290943, 4096, 11008, 32, 32, None, 2048, num_experts=1, moe_topk=1),
    layers=None,
    model_type="hunyuan_v1_moe",
    names={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
)

"""Seed-OSS: Llama with biases of queries, keys and values. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, sizes, uniform


def seed_oss(c: Mapping[str, Any]) -> Part:
    base = sizes(c)
    mixer = parts.attention(base, bias=bool(c["attention_bias"]), output_bias=bool(c["attention_out_bias"]))
    return uniform(base, mixer, parts.mlp(base, bool(c["mlp_bias"])))


ARCHITECTURE = Architecture(
    name="SeedOssForCausalLM",
    tree=seed_oss,
    defaults=common(
        155136,
        4096,
        27648,
        64,
        80,
        8,
        524288,
        head_dim=128,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
    ),
    layers=None,
    model_type="seed_oss",
)

"""MiniMax-M2: norms over all heads, and experts. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import common, experts, sizes, uniform


def minimax_m2(c: Mapping[str, Any]) -> Part:
    base, count, used = sizes(c), c["num_local_experts"], c["num_experts_per_tok"]
    feeding = experts(base, count, c["intermediate_size"], used, correction=True, name="block_sparse_moe")
    return uniform(base, parts.attention(base, norms=parts.joint_norms(base)), feeding)


ARCHITECTURE = Architecture(
    name="MiniMaxM2ForCausalLM",
    tree=minimax_m2,
    defaults=common(200064, 3072, 1536, 62, 48, 8, 196608, head_dim=128, num_local_experts=256, num_experts_per_tok=8),
    layers=None,
    model_type="minimax_m2",
    names={"num_experts": "num_local_experts"},
)

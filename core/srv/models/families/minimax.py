"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others, and experts in all.

Each norm's result, times a constant, is the residual. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import Factors, JointNorm, Layer, Linear, Part, alike
from srv.models.blueprint.recurrent import Lightning
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes, one_window
from srv.models.families.builders.layer_types import ATTENTION, check_experts, has_attention
from srv.models.layers.moe_config import Routing
from srv.models.layers.recurrent_sizes import ScanSizes

KINDS = (ATTENTION, "linear_attention")

_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # stored, but known from the sizes


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(config, reads=("num_local_experts",))
    types = config["layer_types"]
    attends = has_attention(
        [KINDS[i % 2] for i in range(sizes.layers)] if types is None else types, KINDS, sizes.layers
    )
    routing, count = Routing(int(config["num_experts_per_tok"]), renormalize=True), int(config["num_local_experts"])
    check_experts(routing.top_k, count)
    full, linear, mlp = (
        Factors(float(config[f"{name}_alpha_factor"]), float(config[f"{name}_beta_factor"]))
        for name in ("full_attn", "linear_attn", "mlp")
    )
    attention = parts.attention(sizes, window=one_window(config))
    experts = parts.mixture(sizes, count, sizes.intermediate_size, routing)

    def layer(index: int | None) -> Layer:
        """`index`: of one with lightning attention, each of which has decays of its own."""
        mixer = attention if index is None else _lightning(sizes, index)
        made = parts.pre_norm(sizes, mixer, experts, adds=False)
        factors = full if index is None else linear
        return replace(made, order="normed_residual", mixer_factors=factors, factors=mlp)

    made = alike((None if each else index for index, each in enumerate(attends)), layer)
    return parts.decoder(sizes, made, parts.last_norm(sizes, adds=False))


def _lightning(sizes: Sizes, index: int) -> Lightning:
    hidden, scan = sizes.hidden_size, ScanSizes(sizes.heads, sizes.heads, sizes.head_dim, sizes.head_dim)
    return Lightning(
        Linear({"qkv_proj": 3 * scan.inner}, hidden, split="out", unit=3 * scan.head_dim),
        Linear({"output_gate": scan.inner}, hidden, split="out", unit=scan.head_dim),
        JointNorm(scan.inner, sizes.norm_eps, name="norm", heads=scan.heads),
        Linear({"out_proj": hidden}, scan.inner, split="in"),
        scan,
        1 - index / (sizes.layers - 1 + 1e-5) + 1e-5,
        name="self_attn",
    )


ARCHITECTURE = Architecture(
    name="MiniMaxForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "layer_types": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        **{f"{name}_{side}_factor": 1.0 for name in ("full_attn", "linear_attn", "mlp") for side in ("alpha", "beta")},
    },
    weights=(
        Rename(parts={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}),
        Skip(tuple(f"model.layers.*.self_attn.{name}" for name in _DECAYS)),
    ),
    runs_through_transformers=False,
)

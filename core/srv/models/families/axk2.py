"""A.X-K2: DeepSeek-V3.2 with a gate on the results of attention, and gates of norms.

The gates of attention are fused with the queries, in a projection from the compressed queries with and without their
norm. Groups of experts are refused: the class of transformers scores the experts of other groups as 0, so that it
prefers them to experts of the chosen groups whose scores are negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import MLP, Layer, Linear, MoE, Part, alike
from srv.models.blueprint.latent import GatedNorm, Latent
from srv.models.checkpoints.rules import PermuteRotary, Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.deepseek import rotary_dims
from srv.models.families.deepseek_v32 import DEFAULTS, sparse_parts
from srv.models.unsupported import UnsupportedConfig, refuse_unless

_COMPONENTS = {"W_down": "mlp.fc1", "W_up": "mlp.fc2", "q_b_proj": "q_gate_proj"}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"n_group": (1,), "topk_group": (1,)})
    rank = int(config["gated_norm_rank"])
    if rank < 1:
        raise UnsupportedConfig(f"gated_norm_rank = {rank} is not a size")
    read = {name: value for name, value in config.items() if name != "moe_layer_freq"}
    read["mlp_layer_types"] = config["mlp_layer_types"] or _mlp_types(config)
    kinds = ["full"] * int(config["num_hidden_layers"])
    sizes, mixers, feeding = sparse_parts(read, kinds, gated_queries=True)

    def layer(kind: tuple[Latent, MLP | MoE]) -> Layer:
        """The first norm has a gate, and so has that of a mixture of experts."""
        made = parts.pre_norm(sizes, *kind)
        before = _gated_norm(sizes, rank, parts.BEFORE_MIXER)
        between = (_gated_norm(sizes, rank, parts.BEFORE_MLP),) if isinstance(made.feed_forward, MoE) else made.between
        return replace(made, before=(before,), between=between)

    return parts.decoder(sizes, alike(zip(mixers, feeding, strict=True), layer))


def _gated_norm(sizes: Sizes, rank: int, name: str) -> GatedNorm:
    """`rank`: the inner size of its gate."""
    hidden = sizes.hidden_size
    down, up = Linear({"mlp.fc1": rank}, hidden), Linear({"mlp.fc2": hidden}, rank)
    return GatedNorm(hidden, sizes.norm_eps, adds=True, down=down, up=up, name=name)


def _mlp_types(config: Mapping[str, Any]) -> list[str]:
    """Experts from layer `first_k_dense_replace` on, in the layers whose number is a multiple of `moe_layer_freq`."""
    first, every = int(config["first_k_dense_replace"]), int(config["moe_layer_freq"])
    if every < 1:
        raise UnsupportedConfig(f"moe_layer_freq = {every} is not a number of layers")
    layers = range(int(config["num_hidden_layers"]))
    return ["sparse" if index >= first and index % every == 0 else "dense" for index in layers]


ARCHITECTURE = Architecture(
    name="AXK2ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 163840,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": None,
        "topk_group": None,
        "kv_lora_rank": 128,
        "q_lora_rank": 384,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "max_position_embeddings": 131072,
        "index_n_heads": 16,
        "gated_norm_rank": 16,
        "eos_token_id": 163691,
    },
    model_type="axk2",
    weights=(Rename(parts=_COMPONENTS), PermuteRotary(rotary_dims, gated_queries=True)),
    runs_through_transformers=False,
)

"""HY-V4: sparse latent attention as in GLM-5, with gates and sinks, over several residual streams. Torch-free.

Other differences: no rotary pair is adjacent, the indexer rotates its last dimensions, and
routed experts have a clamped activation, whose limit is that of the op `experts`. Layers of multi-token prediction are
not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from srv.models.blueprint import MLP, Layer, MoE, Norm, Part, alike
from srv.models.blueprint.indexers import hy_v4_types
from srv.models.blueprint.latent import Latent
from srv.models.blueprint.streams import StreamMixing, StreamStart
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.deepseek import DEFAULTS
from srv.models.families.deepseek_v32 import sparse_parts
from srv.models.unsupported import UnsupportedConfig, refuse_unless

LIMIT = 10.0  # of the activation "silu_clamped"


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"swiglu_limit": (LIMIT,)})
    count = int(config["hc_mult"])
    if count < 1:
        raise UnsupportedConfig(f"hc_mult = {count} is not a number of residual streams")
    eps = float(config["rms_norm_eps"])
    sizes, mixers, feeding = sparse_parts(
        {**config, "first_k_dense_replace": 1},
        hy_v4_types(config.get, int(config["num_hidden_layers"])),
        index_norm_eps=eps,
        index_rotates_last=True,
        activation="silu_clamped",
        gated=True,
        sinks=True,
    )
    mixing = StreamMixing(
        count, sizes.hidden_size, 2, float(config["hc_magnitude"]), float(config["hc_eps"]), sizes.norm_eps
    )
    before, between = (
        (replace(mixing, name=name), Norm(sizes.hidden_size, sizes.norm_eps, name=norm))
        for name, norm in (("attn_hc", parts.BEFORE_MIXER), ("ffn_hc", parts.BEFORE_MLP))
    )

    def layer(kind: tuple[Latent, MLP | MoE]) -> Layer:
        mixer, feed_forward = kind
        return Layer(before, (mixer,), between, feed_forward, order="streams")

    made = alike(zip(mixers, feeding, strict=True), layer)
    head = replace(mixing, groups=1, prefix="hc_", name="hc_head")
    return parts.decoder(sizes, made, head, parts.last_norm(sizes, adds=False), before=(StreamStart(count),))


def _stored_names() -> Iterator[tuple[str, str]]:
    """Published names of the weights of streams, and those of the layers, which transformers has as well."""
    for stored, own in (("hc_attn_layer", "attn_hc"), ("hc_mlp_layer", "ffn_hc")):
        for weight in ("fn", "base", "scale"):
            for module in (stored, f"{stored}.hc_pre", f"hc_pre.{stored}"):
                yield f"model.layers.*.{module}.hc_{weight}", f"model.layers.*.{own}.{weight}"
    for weight in ("fn", "base", "scale"):
        for module in ("hc_head", "hc_head.hc_pre", "hc_pre.hc_head"):
            yield f"model.{module}.hc_head_{weight}", f"model.hc_head.hc_{weight}"


ARCHITECTURE = Architecture(
    name="HYV4ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 120832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 120025,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.827,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "mlp_layer_types": None,
        "layer_types": None,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 16,
        "indexer_types": None,
        "hc_mult": 4,
        "hc_magnitude": 2.0,
        "hc_eps": 1e-6,
        "swiglu_limit": LIMIT,
    },
    model_type="hy_v4",
    weights=(Rename(dict(_stored_names()), parts={"linear_gate": "gate_proj", "learnable_sink_param": "sinks"}),),
    runs_through_transformers=False,
)

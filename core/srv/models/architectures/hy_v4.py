"""HY-V4: sparse latent attention as in GLM-5, with gates and sinks, over several residual streams. Torch-free.

Other differences: no rotary pair is adjacent, the indexer rotates its last dimensions, and
routed experts have a clamped activation, whose limit is that of the op `experts`. Layers of multi-token prediction are
not loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from srv.models.architectures import parts
from srv.models.architectures.architecture import Architecture
from srv.models.architectures.deepseek_config import DEFAULTS, DeepseekConfig
from srv.models.architectures.deepseek_v32 import sparse_config
from srv.models.architectures.described import Described
from srv.models.blueprint import Layer, Norm, Part
from srv.models.checkpoints.rules import Rename
from srv.models.indexers import hy_v4_types
from srv.models.layers.rope_config import UnsupportedConfig, refuse_unless
from srv.models.stream_parts import StreamMixing, StreamStart

LIMIT = 10.0  # of the activation "silu_clamped"


@dataclass(frozen=True)
class HyV4Config(Described):
    """`base`: attention and experts. `mixing`: of the residual streams before and after a part of a layer."""

    base: DeepseekConfig
    mixing: StreamMixing

    @functools.cached_property
    def tree(self) -> Part:
        sizes = self.base.decoder
        kinds = [(self.base.has_indexer(index), sizes.moe_of(index)) for index in range(sizes.layers)]
        head = replace(self.mixing, groups=1, prefix="hc_", name="hc_head")
        after = (head, parts.last_norm(sizes, adds=False))
        return parts.decoder(sizes, parts.layers(kinds, self._layer), *after, before=(StreamStart(self.mixing.number),))

    def _layer(self, index: int) -> Layer:
        base, sizes = self.base, self.base.decoder
        before, between = (
            (replace(self.mixing, name=mixing), Norm(sizes.hidden_size, sizes.norm_eps, name=norm))
            for mixing, norm in (("attn_hc", parts.BEFORE_MIXER), ("ffn_hc", parts.BEFORE_MLP))
        )
        mixer = base.attention.part(sizes.rope, base.has_indexer(index))
        return Layer(before, (mixer,), between, parts.feed_forward(sizes, sizes.moe_of(index)), order="streams")


def make_config(config: Mapping[str, Any]) -> HyV4Config:
    refuse_unless(config, {"swiglu_limit": (LIMIT,)})
    count = int(config["hc_mult"])
    if count < 1:
        raise UnsupportedConfig(f"hc_mult = {count} is not a number of residual streams")
    kinds = hy_v4_types(config.get, int(config["num_hidden_layers"]))
    base = sparse_config({**config, "first_k_dense_replace": 1}, kinds)
    eps = base.decoder.norm_eps
    attention = base.attention._replace(gated=True, sinks=True, index_norm_eps=eps, index_rotates_last=True)
    moe = None if base.decoder.moe is None else base.decoder.moe._replace(activation="silu_clamped")
    base = base.replace(attention=attention, decoder=base.decoder.replace(moe=moe))
    magnitude, added = float(config["hc_magnitude"]), float(config["hc_eps"])
    return HyV4Config(base, StreamMixing(count, base.decoder.hidden_size, 2, magnitude, added, eps))


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
    make_config=make_config,
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
)

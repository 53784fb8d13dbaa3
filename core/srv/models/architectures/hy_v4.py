"""HY-V4: sparse latent attention as in GLM-5, with gates and sinks, over several residual streams. Torch-free.

`hy_v4_layers` computes. Other differences: no rotary pair is adjacent, the indexer rotates its last dimensions, and
routed experts have a clamped activation, whose limit is that of the op `experts`. Layers of multi-token prediction are
not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from srv.models.architectures.architecture import Architecture, DividedSizes
from srv.models.architectures.deepseek_config import DEFAULTS, DeepseekConfig
from srv.models.architectures.deepseek_v32 import sparse_config
from srv.models.architectures.op_uses import ADD_NORM
from srv.models.derive import ModelOps
from srv.models.formats.stored_weights import StoredWeights
from srv.models.indexers import hy_v4_types
from srv.models.layers.moe_config import MoEConfig
from srv.models.layers.rope_config import UnsupportedConfig, refuse_unless
from srv.models.layers.stream_sizes import StreamSizes
from srv.specs import AttentionLayer

LIMIT = 10.0  # of the activation "silu_clamped"


class HyV4Config(NamedTuple):
    """`base`: attention and experts; `streams`: those of the residual."""

    base: DeepseekConfig
    streams: StreamSizes

    @property
    def moe(self) -> MoEConfig | None:
        """The mixture of experts of the layers that have one."""
        return self.base.moe

    @property
    def parameters(self) -> int:
        sizes = self.base.decoder
        return self.base.parameters + self.streams.parameters(sizes.hidden_size, sizes.layers)

    @property
    def projection_params(self) -> int:
        return self.base.projection_params

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return self.base.attention_layers

    @property
    def divided(self) -> DividedSizes | None:
        return self.base.divided

    def of_rank(self, ranks: int) -> HyV4Config:
        """The part of one rank; the weights of streams are on every rank."""
        return self._replace(base=self.base.of_rank(ranks))

    def model_ops(self, dtype: str) -> ModelOps:
        """Nothing is added to a residual within a norm."""
        own = self.base.model_ops(dtype)
        return own._replace(ops=tuple(use for use in own.ops if use.op != ADD_NORM))


def make_config(config: Mapping[str, Any]) -> HyV4Config:
    refuse_unless(config, {"swiglu_limit": (LIMIT,)})
    count = int(config["hc_mult"])
    if count < 1:
        raise UnsupportedConfig(f"hc_mult = {count} is not a number of residual streams")
    kinds = hy_v4_types(config.get, int(config["num_hidden_layers"]))
    base = sparse_config({**config, "first_k_dense_replace": 1}, kinds)
    eps = base.decoder.norm_eps
    attention = base.attention._replace(gated=True, sinks=True, index_norm_eps=eps, index_rotates_last=True)
    moe = None if base.moe is None else base.moe._replace(activation="silu_clamped")
    base = base._replace(attention=attention, decoder=base.decoder._replace(moe=moe))
    return HyV4Config(base, StreamSizes(count, float(config["hc_magnitude"]), float(config["hc_eps"]), eps))


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
    layers="srv.models.architectures.hy_v4_layers:HyV4",
    model_type="hy_v4",
    weights=StoredWeights(
        names=dict(_stored_names()), components={"linear_gate": "gate_proj", "learnable_sink_param": "sinks"}
    ),
)

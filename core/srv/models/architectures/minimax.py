"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others, and experts in all.

Each norm's result, times a constant, is the residual. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from srv.models.architectures import parts
from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config, one_window
from srv.models.architectures.hybrid_config import ATTENTION, HybridConfig, attending, check_experts
from srv.models.blueprint import Attention, Factors, Layer, Linear, Norm, Part
from srv.models.checkpoints.rules import Rename, Skip
from srv.models.layers.moe_config import MoEConfig, Routing
from srv.models.layers.recurrent_sizes import ScanSizes
from srv.models.recurrent_parts import Lightning

KINDS = (ATTENTION, "linear_attention")

_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # stored, but known from the sizes


@dataclass(frozen=True)
class MiniMaxConfig(HybridConfig):
    """`attends`: whether each layer has softmax attention. `moe`: the mixture of experts of all layers. `full`,
    `linear`, `mlp`: the factors after softmax attention, after lightning attention and after experts.
    """

    moe: MoEConfig
    full: Factors
    linear: Factors
    mlp: Factors

    @property
    def scan(self) -> ScanSizes:
        sizes = self.decoder
        return ScanSizes(sizes.heads, sizes.heads, sizes.head_dim, sizes.head_dim)

    @functools.cached_property
    def tree(self) -> Part:
        sizes = self.decoder
        decays = (None if attends else index for index, attends in enumerate(self.attends))  # each has its own
        made = parts.layers(list(zip(decays, sizes.windows, strict=True)), self._layer)
        return parts.decoder(sizes, made, parts.last_norm(sizes, adds=False))

    def _layer(self, index: int) -> Layer:
        mixer: Attention | Lightning
        attends = self.attends[index]
        mixer = parts.attention(self.decoder, index) if attends else self._lightning(index)
        made = parts.pre_norm(self.decoder, mixer, parts.feed_forward(self.decoder, self.moe), adds=False)
        factors = self.full if attends else self.linear
        return replace(made, order="normed_residual", mixer_factors=factors, factors=self.mlp)

    def _lightning(self, index: int) -> Lightning:
        hidden, inner = self.decoder.hidden_size, self.scan.inner
        return Lightning(
            Linear({"qkv_proj": 3 * inner}, hidden),
            Linear({"output_gate": inner}, hidden),
            Norm(inner, self.decoder.norm_eps, name="norm"),
            Linear({"out_proj": hidden}, inner),
            self.scan,
            1 - index / (self.decoder.layers - 1 + 1e-5) + 1e-5,
            name="self_attn",
        )


def make_config(config: Mapping[str, Any]) -> MiniMaxConfig:
    base = decoder_config(config, reads=("num_local_experts",))
    types = config["layer_types"]
    attends = attending([KINDS[i % 2] for i in range(base.layers)] if types is None else types, KINDS, base.layers)
    routing = Routing(int(config["num_experts_per_tok"]), renormalize=True)
    moe = MoEConfig(int(config["num_local_experts"]), base.intermediate_size, routing)
    check_experts(moe)
    full, linear, mlp = (
        Factors(float(config[f"{name}_alpha_factor"]), float(config[f"{name}_beta_factor"]))
        for name in ("full_attn", "linear_attn", "mlp")
    )
    decoder = base.replace(windows=one_window(config, base.layers))
    return MiniMaxConfig(decoder, attends, moe, full, linear, mlp)


ARCHITECTURE = Architecture(
    name="MiniMaxForCausalLM",
    make_config=make_config,
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
        **{f"{name}_{side}_factor": 1 for name in ("full_attn", "linear_attn", "mlp") for side in ("alpha", "beta")},
    },
    weights=(
        Rename(parts={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}),
        Skip(tuple(f"model.layers.*.self_attn.{name}" for name in _DECAYS)),
    ),
)

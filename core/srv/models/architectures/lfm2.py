"""LFM2: short convolutions in most layers, attention in the others; feed-forward layers, or mixtures of experts.

Torch-free. Checkpoints name the projections of an MLP, and norms, otherwise than those of the
other models.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from srv.models.architectures import parts
from srv.models.architectures.architecture import Architecture
from srv.models.architectures.decoder_config import decoder_config
from srv.models.architectures.hybrid_config import ATTENTION, HybridConfig, attending, check_experts
from srv.models.blueprint import Attention, Layer, Linear, Norm, Part, Tensors
from srv.models.checkpoints.rules import Rename
from srv.models.layers.moe_config import MoEConfig, Routing
from srv.models.layers.recurrent_sizes import ShortConvolutionSizes
from srv.models.layers.rope_config import RopeConfig
from srv.models.recurrent_parts import ShortConvolution

KINDS = (ATTENTION, "conv")
OUTPUT_NORMS = ("post_operator_norm", "post_ffn_norm")


@dataclass(frozen=True)
class Lfm2Config(HybridConfig):
    """`width`: the tokens that a convolution reads. `bias`: whether the layers of convolutions have biases. `moe`: the
    mixture of experts that layers have from `first_sparse` on; None without. `local_rope`: the rotary embedding of
    layers with a window; None without any. `output_norms`: both parts of a layer have a norm after them. `head_gates`:
    each head of attention has a gate.
    """

    width: int
    bias: bool
    moe: MoEConfig | None = None
    first_sparse: int = 0
    local_rope: RopeConfig | None = None
    output_norms: bool = False
    head_gates: bool = False

    def moe_of(self, index: int) -> MoEConfig | None:
        """The mixture of experts of a layer; None if it has an MLP."""
        return self.moe if index >= self.first_sparse else None

    @functools.cached_property
    def tree(self) -> Part:
        sizes = self.decoder
        experts = [self.moe_of(index) is not None for index in range(sizes.layers)]
        made = parts.layers(list(zip(self.attends, sizes.windows, experts, strict=True)), self._layer)
        return parts.decoder(sizes, made, parts.last_norm(sizes))

    def _layer(self, index: int) -> Layer:
        sizes, hidden, eps = self.decoder, self.decoder.hidden_size, self.decoder.norm_eps
        if self.attends[index]:
            rope = None if sizes.windows[index] is None else self.local_rope
            mixer: Attention | ShortConvolution
            mixer = parts.attention(sizes, index, rope=rope, head_gates=self.head_gates)
        else:
            mixer = self._convolution()
        made = parts.pre_norm(sizes, mixer, parts.feed_forward(sizes, self.moe_of(index)))
        if not self.output_norms:
            return made
        after, last = (Norm(hidden, eps, name=name) for name in OUTPUT_NORMS)
        return replace(made, between=(after, *made.between), after=(last,))

    def _convolution(self) -> ShortConvolution:
        hidden = self.decoder.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"conv.weight": (hidden, 1, self.width)}
        return ShortConvolution(
            Linear({"in_proj": 3 * hidden}, hidden, self.bias),
            Tensors({**shapes, "conv.bias": (hidden,)} if self.bias else shapes),
            Linear({"out_proj": hidden}, hidden, self.bias),
            ShortConvolutionSizes(hidden, self.width),
            name="conv",
        )


def make_dense(config: Mapping[str, Any]) -> Lfm2Config:
    read = _renamed(config, {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"})
    types, stated = read.get("layer_types"), read.get("full_attn_idxs")
    if types is None:
        layers = range(int(read["num_hidden_layers"]))
        types = [ATTENTION if stated is None or index in stated else "conv" for index in layers]
    made = _without_experts({**read, "layer_types": types})
    inner = made.decoder.intermediate_size
    if read["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if read["block_ffn_dim_multiplier"] is not None:
            inner = int(read["block_ffn_dim_multiplier"] * inner)
            inner = read["block_multiple_of"] * -(-inner // read["block_multiple_of"])
    return replace(made, decoder=made.decoder.replace(intermediate_size=inner))


def make_sparse(config: Mapping[str, Any]) -> Lfm2Config:
    """transformers adds 1e-6 to the sum by which the weights of experts are divided; here nothing is added."""
    read = _renamed(config, {"tie_embedding": "tie_word_embeddings"})
    routing = Routing(
        int(read["num_experts_per_tok"]),
        scoring="sigmoid",
        renormalize=bool(read["norm_topk_prob"]),
        scale=float(read["routed_scaling_factor"]),
        bias=bool(read["use_expert_bias"]),
    )
    moe = MoEConfig(int(read["num_experts"]), int(read["moe_intermediate_size"]), routing)
    check_experts(moe)
    first = int(read["num_dense_layers"])
    made = _without_experts(read, reads=("num_experts",))
    return replace(made, moe=moe if first < made.decoder.layers else None, first_sparse=first)


def _without_experts(config: Mapping[str, Any], reads: tuple[str, ...] = ()) -> Lfm2Config:
    base = decoder_config({**config, "rms_norm_eps": config["norm_eps"]}, reads)
    types = config["layer_types"]
    attends = attending((ATTENTION,) * base.layers if types is None else types, KINDS, base.layers)
    decoder = base.replace(qk_norm=True)
    return Lfm2Config(decoder, attends, int(config["conv_L_cache"]), bool(config["conv_bias"]))


def _renamed(config: Mapping[str, Any], former: Mapping[str, str]) -> dict[str, Any]:
    """With the names that fields have today, in place of `former` ones."""
    return {**config, **{new: config[old] for old, new in former.items() if old in config}}


_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 65536,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "eos_token_id": 2,
    }
)
_NAMES = {
    "model.embedding_norm": "model.norm",
    **{
        f"model.layers.*.{stored}": f"model.layers.*.{own}"
        for stored, own in (
            ("operator_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("self_attn.out_proj", "self_attn.o_proj"),
            ("self_attn.q_layernorm", "self_attn.q_norm"),
            ("self_attn.k_layernorm", "self_attn.k_norm"),
            ("mlp", "mlp.gate"),  # has the bias of the choice of experts
        )
    },
}
_WEIGHTS = (
    Rename(
        _NAMES,
        parts={"feed_forward": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
        suffixes={"expert_bias": "e_score_correction_bias"},
    ),
)
DENSE = Architecture(
    name="Lfm2ForCausalLM",
    make_config=make_dense,
    defaults={
        **_DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    weights=_WEIGHTS,
)
SPARSE = Architecture(
    name="Lfm2MoeForCausalLM",
    make_config=make_sparse,
    defaults={
        **_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "layer_types": None,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    model_type="lfm2_moe",
    weights=_WEIGHTS,
)

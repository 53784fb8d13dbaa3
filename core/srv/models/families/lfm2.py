"""LFM2: short convolutions in most layers, attention in the others; feed-forward layers, or mixtures of experts.

Torch-free. Checkpoints name the projections of an MLP, and norms, otherwise than those of the
other models.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import Attention, Linear, Part, Tensors
from srv.models.blueprint.recurrent import ShortConvolution
from srv.models.checkpoints.gguf_layout import EXPERT_FIELDS, HEAD_NORM_NAMES, SIGMOID_ROUTER, GGUFLayout, layer_names
from srv.models.checkpoints.rules import Rename
from srv.models.checkpoints.slices import Section
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes
from srv.models.families.builders.layer_types import ATTENTION, check_experts, has_attention
from srv.models.layers.moe_config import Routing
from srv.models.layers.recurrent_sizes import ShortConvolutionSizes

KINDS = (ATTENTION, "conv")


def convolution(config: Mapping[str, Any], hidden: int) -> ShortConvolution:
    """That of a layer without attention, from the fields of LFM2 and LFM3."""
    width, bias = int(config["conv_L_cache"]), bool(config["conv_bias"])
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (hidden, 1, width)}
    return ShortConvolution(
        Linear({"in_proj": 3 * hidden}, hidden, bias, split="out", sections=((Section(hidden),) * 3,)),
        Tensors({**shapes, "conv.bias": (hidden,)} if bias else shapes, divided=True),
        Linear({"out_proj": hidden}, hidden, bias, split="in"),
        ShortConvolutionSizes(hidden, width),
        name="conv",
    )


def dense_tree(config: Mapping[str, Any]) -> Part:
    read = _renamed(config, {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"})
    types, stated = read.get("layer_types"), read.get("full_attn_idxs")
    if types is None:
        layers = range(int(read["num_hidden_layers"]))
        types = [ATTENTION if stated is None or index in stated else "conv" for index in layers]
    sizes, mixers = _sizes_and_mixers({**read, "layer_types": types})
    inner = sizes.intermediate_size
    if read["block_auto_adjust_ff_dim"]:
        inner = int(2 * inner / 3)
        if read["block_ffn_dim_multiplier"] is not None:
            inner = int(read["block_ffn_dim_multiplier"] * inner)
            inner = read["block_multiple_of"] * -(-inner // read["block_multiple_of"])
    mlp = parts.mlp(sizes, inner=inner)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, mlp))


def sparse_tree(config: Mapping[str, Any]) -> Part:
    """transformers adds 1e-6 to the sum by which the weights of experts are divided; here nothing is added."""
    read = _renamed(config, {"tie_embedding": "tie_word_embeddings"})
    routing = Routing(
        int(read["num_experts_per_tok"]),
        scoring="sigmoid",
        renormalize=bool(read["norm_topk_prob"]),
        scale=float(read["routed_scaling_factor"]),
        bias=bool(read["use_expert_bias"]),
    )
    count, inner = int(read["num_experts"]), int(read["moe_intermediate_size"])
    check_experts(routing.top_k, count)
    first = int(read["num_dense_layers"])
    sizes, mixers = _sizes_and_mixers(read, reads=("num_experts",))
    sparse, dense = parts.mixture(sizes, count, inner, routing), parts.mlp(sizes)
    feeding = [sparse if index >= first else dense for index in range(sizes.layers)]
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, feeding))


def _sizes_and_mixers(
    config: Mapping[str, Any], reads: tuple[str, ...] = ()
) -> tuple[Sizes, list[Attention | ShortConvolution]]:
    sizes = decoder_sizes({**config, "rms_norm_eps": config["norm_eps"]}, reads)
    types = config["layer_types"]
    attends = has_attention((ATTENTION,) * sizes.layers if types is None else types, KINDS, sizes.layers)
    attention = parts.attention(sizes, norms=parts.head_norms(sizes))
    conv = convolution(config, sizes.hidden_size)
    return sizes, [attention if each else conv for each in attends]


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
_GGUF_NAMES = (
    HEAD_NORM_NAMES,
    Rename({"token_embd_norm": "model.norm"}),
    layer_names({f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}),
)
_GGUF_FIELDS = {
    "attention.head_count_kv": "gguf_kv_heads",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": "conv_L_cache",
}
_GGUF_PRESENT = {"conv_bias": "blk.0.shortconv.conv.bias"}


def _of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Layers without key heads are those with convolutions."""
    heads = config["gguf_kv_heads"]
    types = [ATTENTION if each else "conv" for each in heads] if isinstance(heads, list) else None
    return {**{name: value for name, value in config.items() if name != "gguf_kv_heads"}, "layer_types": types}


DENSE = Architecture(
    name="Lfm2ForCausalLM",
    tree=dense_tree,
    defaults={
        **_DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    gguf=GGUFLayout(
        "lfm2",
        weights=_GGUF_NAMES,
        fields=_GGUF_FIELDS,
        constants={"block_auto_adjust_ff_dim": False},
        present=_GGUF_PRESENT,
        complete=_of_gguf,
    ),
    weights=_WEIGHTS,
    runs_through_transformers=False,
)
SPARSE = Architecture(
    name="Lfm2MoeForCausalLM",
    tree=sparse_tree,
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
    gguf=GGUFLayout(
        "lfm2moe",
        weights=_GGUF_NAMES,
        fields={
            **_GGUF_FIELDS,
            **EXPERT_FIELDS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        implied=SIGMOID_ROUTER,
        constants={"norm_topk_prob": True, "use_expert_bias": True},
        present=_GGUF_PRESENT,
        complete=_of_gguf,
    ),
    model_type="lfm2_moe",
    weights=_WEIGHTS,
    runs_through_transformers=False,
)

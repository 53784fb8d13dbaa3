"""Families with a mixture of experts, with attention per head or latent attention. Torch-free."""

from __future__ import annotations

import dataclasses

from srv.models.architectures import parts
from srv.models.architectures.decoder_config import DecoderConfig
from srv.models.architectures.deepseek_config import DeepseekConfig
from srv.models.blueprint import MLP, Attention, Layer, Linear, MoE, Part, Tensors
from srv.models.families.dense import exaone_windows
from srv.models.families.family import Family, Fields, common
from srv.models.families.kinds import UnevenAttention
from srv.models.families.shapes import (
    SLIDING,
    biased,
    every,
    experts,
    kinds,
    latent,
    normed,
    sizes,
    sparse_from,
    uniform,
    windows,
)
from srv.models.layers.moe_config import MoEConfig


def _deepseek_experts(c: Fields) -> MoEConfig:
    """A shared MLP of several experts' size, and a correction of the router."""
    inner = c.moe_intermediate_size
    shared = (c.get("n_shared_experts") or 0) * inner
    return experts(c.n_routed_experts, inner, c.num_experts_per_tok, shared=shared, correction=True)


def glm4_moe_lite(c: Fields) -> Part:
    base = sizes(c, moe=_deepseek_experts(c), moe_layers=sparse_from(c, 1))
    return DeepseekConfig(base, latent(c)).tree


def dots1(c: Fields) -> Part:
    window, last = c.sliding_window, c.max_window_layers
    sparse = sparse_from(c, c.first_k_dense_replace)
    return sizes(
        c, qk_norm=True, windows=windows(c, lambda index: SLIDING if window and index >= last else "full_attention"),
        moe=_deepseek_experts(c) if any(sparse) else None, moe_layers=sparse, **biased(c),
    ).tree  # fmt: skip


def exaone_moe(c: Fields) -> Part:
    inner = c.moe_intermediate_size
    shared = c.num_shared_experts * inner
    moe = experts(c.num_experts, inner, c.num_experts_per_tok, shared=shared, correction=True)
    sparse = sparse_from(c, c.first_k_dense_replace)
    return sizes(c, qk_norm=True, windows=exaone_windows(c), moe=moe, moe_layers=sparse).tree


def olmoe(c: Fields) -> Part:
    moe = experts(c.num_experts, c.intermediate_size, c.num_experts_per_tok)
    moe_layers = (True,) * c.num_hidden_layers
    return sizes(c, qk_norm=True, wide_qk_norm=True, moe=moe, moe_layers=moe_layers, **biased(c)).tree


def minimax_m2(c: Fields) -> Part:
    moe = experts(c.num_local_experts, c.intermediate_size, c.num_experts_per_tok, correction=True)
    base = sizes(c, qk_norm=True, wide_qk_norm=True)
    return uniform(base, parts.mixture(moe, base.hidden_size, "block_sparse_moe"))


def phimoe(c: Fields) -> Part:
    moe = experts(c.num_local_experts, c.intermediate_size, c.num_experts_per_tok)
    base = sizes(c, windows=(c.sliding_window,) * c.num_hidden_layers, **biased(c))
    feeding = parts.mixture(moe, base.hidden_size, "block_sparse_moe")
    return normed(base, feeding, output_bias=bool(c.lm_head_bias))


def granite_moe(c: Fields) -> Part:
    """With a shared MLP if the configuration has its size."""
    base, count, shared = sizes(c, **biased(c)), c.num_local_experts, c.get("shared_intermediate_size") or 0
    hidden, feeding = base.hidden_size, list[MLP | MoE]()
    if count:
        moe = experts(count, base.intermediate_size, c.num_experts_per_tok)
        feeding.append(parts.mixture(moe, hidden, "block_sparse_moe"))
    if shared:
        first, last = Linear({"input_linear": 2 * shared}, hidden), Linear({"output_linear": hidden}, shared)
        feeding.append(MLP(first, last, name="shared_mlp"))
    return uniform(base, *feeding)


def ernie4_5_moe(c: Fields) -> Part:
    bias, count, inner = bool(c.use_bias), c.moe_num_experts, c.moe_intermediate_size
    last = c.num_hidden_layers - 1 if c.moe_layer_end_index == -1 else c.moe_layer_end_index
    first, step, shared = c.moe_layer_start_index, c.moe_layer_interval, c.moe_num_shared_experts * inner
    base = sizes(c, qkv_bias=bias, output_bias=bias, mlp_bias=bias)
    sparse = parts.mixture(experts(count, inner, c.moe_k, correction=True), base.hidden_size)
    if shared:
        sparse = dataclasses.replace(sparse, shared=parts.mlp(base.hidden_size, shared, bias, name="shared_experts"))
    dense = parts.feed_forward(base, None)
    is_sparse = [(index + 1) % step == 0 and first <= index <= last for index in range(base.layers)]
    own = parts.attention(base, 0)
    made = parts.layers(is_sparse, lambda index: parts.pre_norm(base, own, sparse if is_sparse[index] else dense))
    return parts.decoder(base, made, parts.last_norm(base), output_bias=bias)


def hunyuan_moe(c: Fields) -> Part:
    """The number of experts that a token uses may differ per layer."""
    base = sizes(c, qk_norm=True, **biased(c))
    hidden, inner, layers = base.hidden_size, base.intermediate_size, base.layers
    used = c.moe_topk if isinstance(c.moe_topk, list) else [c.moe_topk] * layers
    shared = parts.mlp(hidden, inner, name="shared_mlp")

    def layer(index: int) -> Layer:
        moe = parts.mixture(experts(c.num_experts, inner, used[index], router="gate.wg"), hidden)
        return parts.pre_norm(base, parts.attention(base, 0), dataclasses.replace(moe, shared=shared))

    return parts.decoder(base, parts.layers(used[:layers], layer), parts.last_norm(base))


def mimo_v2_flash(c: Fields) -> Part:
    """Layers with a window have more KV heads, and attention sinks."""
    types = kinds(c, lambda index: "full_attention" if index == 0 else every(6)(index))
    slides = tuple(kind == SLIDING for kind in types)
    base = sizes(c, moe=_deepseek_experts(c), moe_layers=sparse_from(c, 1))
    moe_layers = base.moe_layers

    def layer(index: int) -> Layer:
        mixer = _uneven(base, c.v_head_dim or base.head_dim, c.sliding_window if slides[index] else None,
                        bool(c.attention_bias), slides[index])  # fmt: skip
        return parts.pre_norm(base, mixer, parts.feed_forward(base, base.moe_of(index)))

    made = parts.layers(list(zip(slides, moe_layers, strict=True)), layer)
    return parts.decoder(base, made, parts.last_norm(base))


def _uneven(base: DecoderConfig, value_dim: int, window: int | None, bias: bool, slides: bool) -> Attention:
    heads, keys, dim = base.heads, base.kv_heads * (2 if slides else 1), base.head_dim
    rows = {"q_proj": heads * dim, "k_proj": keys * dim, "v_proj": keys * value_dim}
    sinks = Tensors({"sinks": (heads,)}, divided=True) if slides else None
    output = Linear({"o_proj": base.hidden_size}, heads * value_dim, split="in")
    return UnevenAttention(
        Linear(rows, base.hidden_size, bias, split="out", unit=dim), output, heads, keys, dim, base.attention_scale,
        base.rope, sinks=sinks, window=window, name="self_attn", value_dim=value_dim,
    )  # fmt: skip


_ROUTED = {"num_local_experts": "n_routed_experts"}
DOTS1 = Family(
    "dots1", dots1,
    common(
        152064, 4608, 10944, 62, 32, 32, 2048, moe_intermediate_size=1408, n_routed_experts=None, n_shared_experts=None,
        num_experts_per_tok=None, first_k_dense_replace=0, sliding_window=4096, max_window_layers=62,
    ),
    _ROUTED,
)  # fmt: skip
ERNIE4_5 = Family(
    "ernie4_5_moe", ernie4_5_moe,
    common(
        103424, 2560, 12288, 28, 20, 4, 131072, tie_word_embeddings=True, use_bias=False, moe_intermediate_size=1536,
        moe_k=6, moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
        moe_layer_interval=1,
    ),
    {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)  # fmt: skip
EXAONE = Family(
    "exaone_moe", exaone_moe,
    common(
        102400, 4096, 16384, 32, 32, 32, 2048, sliding_window=4096, sliding_window_pattern=4, first_k_dense_replace=1,
        moe_intermediate_size=1024, num_experts=64, num_experts_per_tok=8, num_shared_experts=1,
    ),
)  # fmt: skip
GLM4_LITE = Family(
    "glm4_moe_lite", glm4_moe_lite,
    common(
        154880, 2048, 10240, 47, 20, 20, 202752, kv_lora_rank=512, q_lora_rank=768, qk_nope_head_dim=192,
        qk_rope_head_dim=64, v_head_dim=256, moe_intermediate_size=1536, n_routed_experts=64, n_shared_experts=1,
        num_experts_per_tok=4,
    ),
    {"head_dim": "qk_rope_head_dim", **_ROUTED},
)  # fmt: skip
_GRANITE = common(32000, 4096, 11008, 32, 32, None, 2048, num_local_experts=8, num_experts_per_tok=2)
GRANITE = Family("granitemoe", granite_moe, _GRANITE)
GRANITE_SHARED = Family("granitemoeshared", granite_moe, {**_GRANITE, "shared_intermediate_size": 0})
HUNYUAN = Family(
    "hunyuan_v1_moe",
    hunyuan_moe,
    common(290943, 4096, 11008, 32, 32, None, 2048, num_experts=1, moe_topk=1),
    {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
)
MIMO = Family(
    "mimo_v2_flash", mimo_v2_flash,
    common(
        152576, 4096, 16384, 48, 64, 4, 131072, head_dim=192, v_head_dim=128, sliding_window=129,
        moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
    ),
    _ROUTED,
)  # fmt: skip
MINIMAX_M2 = Family(
    "minimax_m2",
    minimax_m2,
    common(200064, 3072, 1536, 62, 48, 8, 196608, head_dim=128, num_local_experts=256, num_experts_per_tok=8),
    {"num_experts": "num_local_experts"},
)
OLMOE = Family(
    "olmoe",
    olmoe,
    common(50304, 2048, 2048, 16, 16, None, 4096, num_experts=64, num_experts_per_tok=8),
    {"num_local_experts": "num_experts"},
)
PHIMOE = Family(
    "phimoe", phimoe,
    common(
        32064, 4096, 6400, 32, 32, 8, 131072, num_local_experts=16, num_experts_per_tok=2, lm_head_bias=False,
        sliding_window=None,
    ),
)  # fmt: skip

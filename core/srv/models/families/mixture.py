"""Families with a mixture of experts, with attention per head or latent attention. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from srv.models.blueprint import MLP, Attention, Layer, Linear, MoE, Part, Tensors, alike
from srv.models.blueprint.without_layers import UnevenAttention
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.without_layers import (
    SLIDING,
    attending,
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
from srv.models.families.dense import exaone_windows
from srv.models.families.family import Family, Fields, common


def _deepseek_experts(c: Fields, base: Sizes) -> MoE:
    """A shared MLP of several experts' size, and a correction of the router."""
    inner = c.moe_intermediate_size
    shared = (c.get("n_shared_experts") or 0) * inner
    return experts(base, c.n_routed_experts, inner, c.num_experts_per_tok, shared=shared, correction=True)


def _either(base: Sizes, sparse: MoE, is_sparse: Sequence[bool]) -> list[MLP | MoE]:
    """The feed-forward part of each layer: experts, or an MLP."""
    dense = parts.mlp(base)
    return [sparse if each else dense for each in is_sparse]


def glm4_moe_lite(c: Fields) -> Part:
    base = sizes(c)
    feeding = _either(base, _deepseek_experts(c, base), sparse_from(c, 1))
    return parts.decoder(base, parts.pre_norm_layers(base, latent(c, base), feeding))


def dots1(c: Fields) -> Part:
    window, last, base = c.sliding_window, c.max_window_layers, sizes(c)
    slides = windows(c, lambda index: SLIDING if window and index >= last else "full_attention")
    mixers = attending(base, slides, norms=parts.head_norms(base), bias=bool(c.attention_bias))
    sparse = sparse_from(c, c.first_k_dense_replace)
    feeding = _either(base, _deepseek_experts(c, base), sparse) if any(sparse) else parts.mlp(base)
    return parts.decoder(base, parts.pre_norm_layers(base, mixers, feeding))


def exaone_moe(c: Fields) -> Part:
    inner, base = c.moe_intermediate_size, sizes(c)
    shared = c.num_shared_experts * inner
    moe = experts(base, c.num_experts, inner, c.num_experts_per_tok, shared=shared, correction=True)
    feeding = _either(base, moe, sparse_from(c, c.first_k_dense_replace))
    mixers = attending(base, exaone_windows(c), norms=parts.head_norms(base))
    return parts.decoder(base, parts.pre_norm_layers(base, mixers, feeding))


def minimax_m2(c: Fields) -> Part:
    base, count, used = sizes(c), c.num_local_experts, c.num_experts_per_tok
    feeding = experts(base, count, c.intermediate_size, used, correction=True, name="block_sparse_moe")
    return uniform(base, parts.attention(base, norms=parts.joint_norms(base)), feeding)


def phimoe(c: Fields) -> Part:
    base, count, used = sizes(c), c.num_local_experts, c.num_experts_per_tok
    feeding = experts(base, count, c.intermediate_size, used, name="block_sparse_moe")
    mixer = parts.attention(base, window=c.sliding_window, bias=bool(c.attention_bias))
    return normed(base, mixer, feeding, output_bias=bool(c.lm_head_bias))


def granite_moe(c: Fields) -> Part:
    """With a shared MLP if the configuration has its size."""
    base, count, shared = sizes(c), c.num_local_experts, c.get("shared_intermediate_size") or 0
    hidden, feeding = base.hidden_size, list[MLP | MoE]()
    if count:
        feeding.append(experts(base, count, base.intermediate_size, c.num_experts_per_tok, name="block_sparse_moe"))
    if shared:
        first, last = Linear({"input_linear": 2 * shared}, hidden), Linear({"output_linear": hidden}, shared)
        feeding.append(MLP(first, last, name="shared_mlp"))
    return uniform(base, parts.attention(base, bias=bool(c.attention_bias)), *feeding)


def ernie4_5_moe(c: Fields) -> Part:
    bias, count, inner = bool(c.use_bias), c.moe_num_experts, c.moe_intermediate_size
    last = c.num_hidden_layers - 1 if c.moe_layer_end_index == -1 else c.moe_layer_end_index
    first, step, shared = c.moe_layer_start_index, c.moe_layer_interval, c.moe_num_shared_experts * inner
    base = sizes(c)
    sparse, dense = experts(base, count, inner, c.moe_k, correction=True), parts.mlp(base, bias)
    if shared:
        sparse = dataclasses.replace(sparse, shared=parts.mlp(base, bias, inner=shared, name="shared_experts"))
    is_sparse = [(index + 1) % step == 0 and first <= index <= last for index in range(base.layers)]
    mixer, feeding = parts.attention(base, bias=bias), [sparse if each else dense for each in is_sparse]
    return parts.decoder(base, parts.pre_norm_layers(base, mixer, feeding), output_bias=bias)


def hunyuan_moe(c: Fields) -> Part:
    """The number of experts that a token uses may differ per layer."""
    base = sizes(c)
    used = c.moe_topk if isinstance(c.moe_topk, list) else [c.moe_topk] * base.layers
    shared = parts.mlp(base, name="shared_mlp")
    mixer = parts.attention(base, norms=parts.head_norms(base), bias=bool(c.attention_bias))

    def layer(used: int) -> Layer:
        moe = experts(base, c.num_experts, base.intermediate_size, used, router="gate.wg")
        return parts.pre_norm(base, mixer, dataclasses.replace(moe, shared=shared))

    return parts.decoder(base, alike(used[: base.layers], layer))


def mimo_v2_flash(c: Fields) -> Part:
    """Layers with a window have more KV heads, and attention sinks."""
    types = kinds(c, lambda index: "full_attention" if index == 0 else every(6)(index))
    base = sizes(c)
    value_dim, bias = c.v_head_dim or base.head_dim, bool(c.attention_bias)

    def mixer(slides: bool) -> Attention:
        return _uneven(base, value_dim, c.sliding_window if slides else None, bias, slides)

    mixers = alike((kind == SLIDING for kind in types), mixer)
    feeding = _either(base, _deepseek_experts(c, base), sparse_from(c, 1))
    return parts.decoder(base, parts.pre_norm_layers(base, mixers, feeding))


def _uneven(base: Sizes, value_dim: int, window: int | None, bias: bool, slides: bool) -> Attention:
    heads, keys, dim = base.heads, base.kv_heads * (2 if slides else 1), base.head_dim
    rows = {"q_proj": heads * dim, "k_proj": keys * dim, "v_proj": keys * value_dim}
    sinks = Tensors({"sinks": (heads,)}, divided=True) if slides else None
    output = Linear({"o_proj": base.hidden_size}, heads * value_dim, split="in")
    return UnevenAttention(
        Linear(rows, base.hidden_size, bias, split="out", unit=dim), output, heads, keys, dim, dim**-0.5,
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
PHIMOE = Family(
    "phimoe", phimoe,
    common(
        32064, 4096, 6400, 32, 32, 8, 131072, num_local_experts=16, num_experts_per_tok=2, lm_head_bias=False,
        sliding_window=None,
    ),
)  # fmt: skip

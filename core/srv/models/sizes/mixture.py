"""Families with a mixture of experts, with attention per head or latent attention."""

from __future__ import annotations

from collections.abc import Sequence

from srv.models.indexers import hy_v4_types, indexer_types
from srv.models.sizes.blocks import (
    LLAMA_NORMS,
    attention,
    decoder,
    experts,
    gated_mlp,
    head_dim,
    kinds,
    latent_attention,
    moe,
    pre_norm,
    window_of,
)
from srv.models.sizes.dense import exaone_kinds
from srv.models.sizes.fields import Fields
from srv.models.sizes.parts import NOTHING, Part, Weight, linear, norm, plain


def mixtral(c: Fields) -> Part:
    mlp = moe(c, count=c.num_local_experts, inner=c.intermediate_size, used=c.num_experts_per_tok)
    return decoder(c, lambda i: pre_norm(c, attention(c, window=c.sliding_window), mlp))


def sparse_layers(c: Fields) -> list[bool]:
    """Qwen's rule: every `decoder_sparse_step`-th layer has experts, but those of `mlp_only_layers` do not."""
    dense, step = set(c.mlp_only_layers or ()), c.decoder_sparse_step
    return [i not in dense and c.num_experts > 0 and (i + 1) % step == 0 for i in range(c.num_hidden_layers)]


def qwen_moe_mlp(c: Fields) -> Part:
    """Experts, and a shared one with a gate if the configuration has its size."""
    shared = c.get("shared_expert_intermediate_size")
    mlp = moe(
        c, count=c.num_experts, inner=c.moe_intermediate_size, used=c.num_experts_per_tok,
        shared=shared or 0, shared_name="shared_expert",
    )  # fmt: skip
    return mlp if shared is None else mlp + plain("mlp.shared_expert_gate", 1, c.hidden_size)


def qwen2_moe(c: Fields) -> Part:
    """If windows are used, every second of the lower layers has one."""
    sparse, mlp, slides = sparse_layers(c), qwen_moe_mlp(c), c.use_sliding_window
    below = c.max_window_layers
    types = kinds(c, lambda i: "sliding_attention" if slides and i % 2 == 0 and i < below else "full_attention")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=c.qkv_bias, window=window_of(c, types[i]) if slides else None)
        return pre_norm(c, own, mlp if sparse[i] else gated_mlp(c))

    return decoder(c, layer)


def qwen3_moe(c: Fields, name: str = "model", tied: object = None) -> Part:
    sparse, mlp, bias = sparse_layers(c), qwen_moe_mlp(c), c.attention_bias
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", window=window)
    return decoder(c, lambda i: pre_norm(c, own, mlp if sparse[i] else gated_mlp(c)), name=name, tied=tied)


def olmoe(c: Fields) -> Part:
    bias = c.attention_bias
    own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="all")
    mlp = moe(c, count=c.num_experts, inner=c.intermediate_size, used=c.num_experts_per_tok)
    return decoder(c, lambda i: pre_norm(c, own, mlp))


def minimax_m2(c: Fields) -> Part:
    mlp = moe(
        c, count=c.num_local_experts, inner=c.intermediate_size, used=c.num_experts_per_tok, name="block_sparse_moe"
    ) + plain("block_sparse_moe.e_score_correction_bias", c.num_local_experts)
    return decoder(c, lambda i: pre_norm(c, attention(c, qk_norms="all"), mlp))


def phimoe(c: Fields) -> Part:
    bias = c.attention_bias
    own = attention(c, qkv_bias=bias, out_bias=bias, window=c.sliding_window)
    mlp = moe(
        c, count=c.num_local_experts, inner=c.intermediate_size, used=c.num_experts_per_tok, name="block_sparse_moe"
    )
    return decoder(c, lambda i: pre_norm(c, own, mlp, bias=True), norm_bias=True, head_bias=c.lm_head_bias)


def gpt_oss(c: Fields) -> Part:
    """Experts with biases, attention sinks, and a window in every second layer."""
    hidden, inner, count = c.hidden_size, c.intermediate_size, c.num_local_experts
    used, bias = min(c.num_experts_per_tok, count), c.attention_bias
    types = kinds(c, lambda i: "full_attention" if i % 2 else "sliding_attention")
    weights = (
        Weight("mlp.experts.gate_up_proj", (2 * inner, hidden), "expert", count, used),
        Weight("mlp.experts.down_proj", (hidden, inner), "expert", count, used),
        Weight("mlp.experts.gate_up_proj_bias", (2 * inner,), "plain", count, used),
        Weight("mlp.experts.down_proj_bias", (hidden,), "plain", count, used),
    )
    mlp = plain("mlp.router", count, hidden) + plain("mlp.router.bias", count) + Part(weights)
    sinks = plain("self_attn.sinks", c.num_attention_heads)

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, window=window_of(c, types[i]))
        return pre_norm(c, own, sinks, mlp)

    return decoder(c, layer)


def granite_moe(c: Fields) -> Part:
    """With a shared MLP if the configuration has its size."""
    bias = c.attention_bias
    mlp = granite_experts(c) + granite_shared_mlp(c)
    return decoder(c, lambda i: pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), mlp))


def granite_experts(c: Fields) -> Part:
    used, count = c.num_experts_per_tok, c.num_local_experts
    return moe(c, count=count, inner=c.intermediate_size, used=used, name="block_sparse_moe") if count else NOTHING


def granite_shared_mlp(c: Fields) -> Part:
    shared = c.get("shared_intermediate_size") or 0
    first = linear("input_linear", c.hidden_size, 2 * shared) + linear("output_linear", shared, c.hidden_size)
    return first.under("shared_mlp") if shared else NOTHING


def llama4(c: Fields, name: str = "model", tied: object = None) -> Part:
    """Experts in some layers, with a shared one; layers with rotary embedding attend within chunks."""
    bias, count, step = c.attention_bias, c.num_local_experts, c.interleave_moe_layer_step
    sparse = c.moe_layers if c.moe_layers is not None else range(step - 1, c.num_hidden_layers, step)
    rotated = c.no_rope_layers or [(i + 1) % c.no_rope_layer_interval for i in range(c.num_hidden_layers)]
    types = kinds(c, lambda i: "chunked_attention" if rotated[i] else "full_attention")
    mlp = moe(
        c, count=count, inner=c.intermediate_size, used=c.num_experts_per_tok, shared=c.intermediate_size,
        router="router", name="feed_forward", shared_name="shared_expert",
    )  # fmt: skip

    def layer(i: int) -> Part:
        chunk = c.attention_chunk_size if types[i] == "chunked_attention" else None
        own = attention(c, qkv_bias=bias, out_bias=bias, window=chunk)
        return pre_norm(c, own, mlp if i in sparse else gated_mlp(c, "feed_forward", c.intermediate_size_mlp))

    return decoder(c, layer, name=name, tied=tied)


def deepseek_mlp(c: Fields, *, correction: bool = True, bias: object = False) -> Part:
    """DeepSeek's experts: a shared MLP of several experts' size, and a correction of the router since V3."""
    return moe(
        c,
        count=c.n_routed_experts,
        inner=c.moe_intermediate_size,
        used=c.num_experts_per_tok,
        shared=(c.get("n_shared_experts") or 0) * c.moe_intermediate_size,
        correction=correction,
        shared_bias=bias,
    )


def _sparse_from(c: Fields, first: int | None) -> list[bool]:
    """Whether each layer has experts: by `mlp_layer_types`, else from layer `first` on."""
    types: Sequence[str] | None = c.get("mlp_layer_types")
    return [types[i] == "sparse" if types else i >= (first or 0) for i in range(c.num_hidden_layers)]


def deepseek(c: Fields, attention_part: Part, sparse: Sequence[bool]) -> Part:
    mlp, dense = deepseek_mlp(c), gated_mlp(c)
    return decoder(c, lambda i: pre_norm(c, attention_part, mlp if sparse[i] else dense))


def deepseek_v2(c: Fields) -> Part:
    own, sparse = latent_attention(c, bias=c.attention_bias), _sparse_from(c, c.first_k_dense_replace)
    mlp, dense = deepseek_mlp(c, correction=False, bias=c.mlp_bias), gated_mlp(c, bias=c.mlp_bias)
    return decoder(c, lambda i: pre_norm(c, own, mlp if sparse[i] else dense))


def deepseek_v3(c: Fields) -> Part:
    """Also Kimi-K2, which has this class. Layers of multi-token prediction are not counted."""
    own = latent_attention(c, bias=c.attention_bias)
    return deepseek(c, own, _sparse_from(c, c.first_k_dense_replace))


def deepseek_v32(c: Fields) -> Part:
    """V3 with an indexer per layer, which caches one key per token and no value."""
    own = latent_attention(c, bias=c.attention_bias, extra=indexer(c), index_dim=c.index_head_dim)
    return deepseek(c, own, _sparse_from(c, c.first_k_dense_replace))


def glm_moe_dsa(c: Fields) -> Part:
    """GLM-5: V3.2, in which some layers attend to the keys that the indexer of a layer before has chosen."""
    sparse, types = _sparse_from(c, c.first_k_dense_replace), indexer_types(c.get, c.num_hidden_layers)
    mlp, dense, dim = deepseek_mlp(c), gated_mlp(c), c.index_head_dim
    full = latent_attention(c, bias=c.attention_bias, extra=indexer(c), index_dim=dim)
    shared = latent_attention(c, bias=c.attention_bias, index_dim=dim)

    def layer(index: int) -> Part:
        own = shared if index < len(types) and types[index] == "shared" else full
        return pre_norm(c, own, mlp if sparse[index] else dense)

    return decoder(c, layer)


def axk2(c: Fields) -> Part:
    """V3.2 with a gate beside each query, and gates of the first norm of a layer and of that of its experts."""
    own = latent_attention(c, bias=c.attention_bias, extra=indexer(c), index_dim=c.index_head_dim, gated=True)
    first, every = c.get("first_k_dense_replace", 1), c.get("moe_layer_freq", 1)
    sparse = [kind and (c.mlp_layer_types or i % every == 0) for i, kind in enumerate(_sparse_from(c, first))]
    hidden, rank, (before, after) = c.hidden_size, c.gated_norm_rank, LLAMA_NORMS
    gated = norm("norm", hidden) + linear("W_down", hidden, rank) + linear("W_up", rank, hidden)
    mlp, dense = deepseek_mlp(c) + gated.under(after), gated_mlp(c) + norm(after, hidden)
    return decoder(c, lambda i: own + gated.under(before) + (mlp if sparse[i] else dense))


def hy_v4(c: Fields) -> Part:
    """Sparse attention as in GLM-5, with gates and sinks, and weights that mix several residual streams."""
    hidden, count = c.hidden_size, c.hc_mult
    sparse, mlp, dense = _sparse_from(c, 1), deepseek_mlp(c), gated_mlp(c)
    heads, bias, dim = c.num_attention_heads, c.attention_bias, c.index_head_dim
    extra = (linear("gate_proj", hidden, heads * c.v_head_dim) + plain("sinks", heads)).under("self_attn")
    types = hy_v4_types(c.get, c.num_hidden_layers)
    own = latent_attention(c, bias=bias, index_dim=dim) + extra
    full = latent_attention(c, bias=bias, extra=indexer(c), index_dim=dim) + extra
    both = streams(hidden, count, 2).under("attn_hc") + streams(hidden, count, 2).under("ffn_hc")

    def layer(i: int) -> Part:
        return pre_norm(c, own if types[i] == "shared" else full, both, mlp if sparse[i] else dense)

    return decoder(c, layer, extra=streams(hidden, count, 1, "hc_").under("hc_head"))


def streams(hidden: int, count: int, groups: int, prefix: str = "") -> Part:
    """The weights by which `count` residual streams are mixed (`srv.models.layers.hyper_connections`)."""
    own = plain(f"{prefix}fn", groups * count, count * hidden) + plain(f"{prefix}base", groups * count)
    return own + plain(f"{prefix}scale", groups)


def indexer(c: Fields) -> Part:
    """The indexer of a layer (DeepSeek-V3.2)."""
    heads, dim = c.index_n_heads, c.index_head_dim
    own = linear("wq_b", c.q_lora_rank, heads * dim) + linear("wk", c.hidden_size, dim)
    own += norm("k_norm", dim, bias=True) + linear("weights_proj", c.hidden_size, heads)
    return own.under("indexer")


def glm4_moe_lite(c: Fields) -> Part:
    return deepseek(c, latent_attention(c, bias=c.attention_bias), _sparse_from(c, 1))


def glm4_moe(c: Fields) -> Part:
    own = attention(c, qkv_bias=c.attention_bias, qk_norms="head" if c.use_qk_norm else "none")
    return deepseek(c, own, _sparse_from(c, c.first_k_dense_replace))


def dots1(c: Fields) -> Part:
    bias, sparse = c.attention_bias, _sparse_from(c, c.first_k_dense_replace)
    window, last = c.sliding_window, c.max_window_layers
    types = kinds(c, lambda i: "sliding_attention" if window and i >= last else "full_attention")
    mlp = deepseek_mlp(c) if any(sparse) else NOTHING

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", window=window_of(c, types[i]))
        return pre_norm(c, own, mlp if sparse[i] else gated_mlp(c))

    return decoder(c, layer)


def exaone_moe(c: Fields) -> Part:
    types, sparse = exaone_kinds(c), _sparse_from(c, c.first_k_dense_replace)
    mlp = moe(
        c, count=c.num_experts, inner=c.moe_intermediate_size, used=c.num_experts_per_tok,
        shared=c.num_shared_experts * c.moe_intermediate_size, correction=True,
    )  # fmt: skip

    def layer(i: int) -> Part:
        own = attention(c, qk_norms="head", window=window_of(c, types[i]))
        return pre_norm(c, own, mlp if sparse[i] else gated_mlp(c))

    return decoder(c, layer)


def ernie4_5_moe(c: Fields) -> Part:
    """The correction of the router is a parameter here."""
    bias, count, inner = c.use_bias, c.moe_num_experts, c.moe_intermediate_size
    last = c.num_hidden_layers - 1 if c.moe_layer_end_index == -1 else c.moe_layer_end_index
    first, step = c.moe_layer_start_index, c.moe_layer_interval
    own = attention(c, qkv_bias=bias, out_bias=bias)
    mlp = moe(c, count=count, inner=inner, used=c.moe_k)
    mlp += plain("mlp.moe_statics.e_score_correction_bias", 1, count)
    shared = c.moe_num_shared_experts
    mlp += gated_mlp(c, "mlp.shared_experts", inner * shared, bias=bias) if shared else NOTHING

    def layer(i: int) -> Part:
        sparse = (i + 1) % step == 0 and first <= i <= last
        return pre_norm(c, own, mlp if sparse else gated_mlp(c, bias=bias))

    return decoder(c, layer, head_bias=bias)


def hunyuan_moe(c: Fields) -> Part:
    """The number of experts that a token uses may differ per layer."""
    bias, names, used = c.attention_bias, ("query_layernorm", "key_layernorm"), c.moe_topk
    own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", norm_names=names)
    inner, count = c.intermediate_size, c.num_experts

    def layer(i: int) -> Part:
        chosen = used[i] if isinstance(used, list) else used
        mlp = plain("mlp.gate.wg", count, c.hidden_size) + experts(c.hidden_size, inner, count, chosen).under("mlp")
        return pre_norm(c, own, mlp, gated_mlp(c, "mlp.shared_mlp"))

    return decoder(c, layer)


def mimo_v2_flash(c: Fields) -> Part:
    """Layers with a window have more KV heads, and attention sinks."""
    bias, sparse = c.attention_bias, _sparse_from(c, 1)
    types = kinds(c, lambda i: "full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention")
    mlp = deepseek_mlp(c)
    sinks = plain("self_attn.sinks", c.num_attention_heads)

    def layer(i: int) -> Part:
        slides = types[i] == "sliding_attention"
        keys = c.num_key_value_heads * (2 if slides else 1)
        own = attention(
            c, qkv_bias=bias, keys=keys, dim=head_dim(c), value_dim=c.v_head_dim, window=window_of(c, types[i])
        )
        return pre_norm(c, own, sinks if slides else NOTHING, mlp if sparse[i] else gated_mlp(c))

    return decoder(c, layer)

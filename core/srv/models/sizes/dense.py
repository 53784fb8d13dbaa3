"""Families of dense decoders with rotary attention, by what they have otherwise than Llama.

Each function returns the model of a configuration. Families that differ in defaults alone share one.
"""

from __future__ import annotations

from srv.models.sizes.blocks import (
    attention,
    decoder,
    gated_mlp,
    head_dim,
    kinds,
    kv_heads,
    latent_attention,
    pre_norm,
    two_layer_mlp,
    window_of,
)
from srv.models.sizes.fields import Fields
from srv.models.sizes.parts import NOTHING, Part, linear, norm, norms, plain, stack

SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def llama(c: Fields) -> Part:
    """Also Granite."""
    bias, mlp_bias = c.attention_bias, c.mlp_bias
    return decoder(
        c,
        lambda i: pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), gated_mlp(c, bias=mlp_bias)),
    )


def mistral(c: Fields) -> Part:
    """Also Ministral 3."""
    window = c.sliding_window
    return decoder(c, lambda i: pre_norm(c, attention(c, window=window), gated_mlp(c)))


def ministral(c: Fields) -> Part:
    types = kinds(c, lambda i: "sliding_attention")
    return decoder(c, lambda i: pre_norm(c, attention(c, window=window_of(c, types[i])), gated_mlp(c)))


def qwen_windows(c: Fields) -> list[int | None]:
    """The window of each layer: usually none, else in the upper layers."""
    types = kinds(c, lambda i: "sliding_attention" if i >= c.max_window_layers else "full_attention")
    return [window_of(c, kind) if c.use_sliding_window else None for kind in types]


def qwen2(c: Fields) -> Part:
    windows = qwen_windows(c)
    return decoder(
        c,
        lambda i: pre_norm(c, attention(c, qkv_bias=True, window=windows[i]), gated_mlp(c)),
    )


def qwen3(c: Fields) -> Part:
    """Norms of query and key heads."""
    bias, windows = c.attention_bias, qwen_windows(c)

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", window=windows[i])
        return pre_norm(c, own, gated_mlp(c))

    return decoder(c, layer)


def smollm3(c: Fields) -> Part:
    """Layers without rotary embedding may have a window."""
    bias, slides = c.attention_bias, c.use_sliding_window
    rotated = c.no_rope_layers or [(i + 1) % c.no_rope_layer_interval for i in range(c.num_hidden_layers)]
    types = kinds(c, lambda i: "full_attention" if rotated[i] or not slides else "sliding_attention")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, window=window_of(c, types[i]))
        return pre_norm(c, own, gated_mlp(c, bias=c.mlp_bias))

    return decoder(c, layer)


def gemma(c: Fields) -> Part:
    bias = c.attention_bias
    return decoder(c, lambda i: pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), gated_mlp(c)))


def gemma2(c: Fields) -> Part:
    """Norms before and after attention and MLP; every second layer has a window."""
    bias = c.attention_bias
    types = kinds(c, lambda i: "full_attention" if i % 2 else "sliding_attention")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, window=window_of(c, types[i]))
        return pre_norm(c, own, gated_mlp(c), names=SANDWICH)

    return decoder(c, layer)


def gemma3(c: Fields) -> Part:
    """As Gemma 2 with norms of heads; all but every sixth layer have a window."""
    bias, pattern = c.attention_bias, c.get("sliding_window_pattern", 6)
    types = kinds(c, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", window=window_of(c, types[i]))
        return pre_norm(c, own, gated_mlp(c), names=SANDWICH)

    return decoder(c, layer)


def phi(c: Fields) -> Part:
    """One layer norm, whose output both attention and MLP read."""

    def layer(i: int) -> Part:
        own = attention(
            c, qkv_bias=True, out_bias=True, out="dense", qk_norms="head" if c.qk_layernorm else "none",
            norm_names=("q_layernorm", "k_layernorm"), norm_bias=True,
        )  # fmt: skip
        mlp = two_layer_mlp(c, "mlp", c.intermediate_size, "fc1", "fc2", bias=True)
        return pre_norm(c, own, mlp, names=("input_layernorm",), bias=True)

    return decoder(c, layer, last_norm="final_layernorm", norm_bias=True, head_bias=True)


def phi3(c: Fields) -> Part:
    window = c.sliding_window
    return decoder(c, lambda i: pre_norm(c, attention(c, fused="qkv_proj", window=window), gated_mlp(c, fused=True)))


def glm(c: Fields) -> Part:
    bias = c.attention_bias
    return decoder(c, lambda i: pre_norm(c, attention(c, qkv_bias=bias), gated_mlp(c, fused=True)))


def glm4(c: Fields) -> Part:
    bias = c.attention_bias
    names = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    return decoder(c, lambda i: pre_norm(c, attention(c, qkv_bias=bias), gated_mlp(c, fused=True), names=names))


def olmo(c: Fields) -> Part:
    """Its norms have no weights."""
    bias = c.attention_bias
    return decoder(c, lambda i: attention(c, qkv_bias=bias, out_bias=bias) + gated_mlp(c), last_norm=None)


def olmo2(c: Fields) -> Part:
    """Norms after attention and MLP, and over all query and key heads together."""
    bias = c.attention_bias

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="all")
        return pre_norm(c, own, gated_mlp(c), names=POST_NORMS)

    return decoder(c, layer)


def olmo3(c: Fields) -> Part:
    """As OLMo 2; all but every fourth layer have a window."""
    bias = c.attention_bias
    types = kinds(c, lambda i: "sliding_attention" if (i + 1) % 4 else "full_attention")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="all", window=window_of(c, types[i]))
        return pre_norm(c, own, gated_mlp(c), names=POST_NORMS)

    return decoder(c, layer)


def cohere(c: Fields) -> Part:
    """One norm, whose output both attention and MLP read. The norms of heads have a weight per head."""
    bias, dim = c.attention_bias, head_dim(c)
    of_heads = plain("q_norm", c.num_attention_heads, dim) + plain("k_norm", kv_heads(c), dim)

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias)
        own += of_heads.under("self_attn") if c.use_qk_norm else NOTHING
        return pre_norm(c, own, gated_mlp(c), names=("input_layernorm",))

    return decoder(c, layer)


def cohere2(c: Fields) -> Part:
    """All but every fourth layer have a window."""
    bias, dim = c.attention_bias, c.hidden_size // c.num_attention_heads
    pattern = c.get("sliding_window_pattern", 4)
    types = kinds(c, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, dim=dim, window=window_of(c, types[i]))
        return pre_norm(c, own, gated_mlp(c), names=("input_layernorm",))

    return decoder(c, layer)


def starcoder2(c: Fields) -> Part:
    bias = c.use_bias
    mlp = two_layer_mlp(c, "mlp", c.intermediate_size, "c_fc", "c_proj", bias=bias)
    window = c.sliding_window
    return decoder(
        c,
        lambda i: pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias, window=window), mlp, bias=True),
        norm_bias=True,
    )


def stablelm(c: Fields) -> Part:
    """The norms of heads have no bias, and those of layers do. With parallel residuals, a layer has one."""
    dim = c.hidden_size // c.num_attention_heads
    of_heads = stack("q_layernorm.norms", c.num_attention_heads, lambda i: plain("weight", dim))
    of_heads += stack("k_layernorm.norms", kv_heads(c), lambda i: plain("weight", dim))
    names = ("input_layernorm",) if c.use_parallel_residual else ("input_layernorm", "post_attention_layernorm")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=c.use_qkv_bias, dim=dim)
        own += of_heads.under("self_attn") if c.qk_layernorm else NOTHING
        return pre_norm(c, own, gated_mlp(c), names=names, bias=True)

    return decoder(c, layer, norm_bias=True)


def nemotron(c: Fields) -> Part:
    """Two linear layers per MLP, and layer norms."""
    bias = c.attention_bias
    mlp = two_layer_mlp(c, "mlp", c.intermediate_size, "up_proj", "down_proj", bias=c.mlp_bias)
    return decoder(c, lambda i: pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), mlp, bias=True), norm_bias=True)


def jais2(c: Fields) -> Part:
    return nemotron(c)


def arcee(c: Fields) -> Part:
    bias = c.attention_bias
    mlp = two_layer_mlp(c, "mlp", c.intermediate_size, "up_proj", "down_proj", bias=c.mlp_bias)
    return decoder(c, lambda i: pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), mlp))


def apertus(c: Fields) -> Part:
    """The activation xIELU has two parameters per layer."""
    bias, names = c.attention_bias, ("attention_layernorm", "feedforward_layernorm")
    mlp = two_layer_mlp(c, "mlp", c.intermediate_size, "up_proj", "down_proj")
    if c.hidden_act == "xielu":
        mlp += plain("mlp.act_fn.alpha_p", 1) + plain("mlp.act_fn.alpha_n", 1)
        mlp += plain("mlp.act_fn.beta") + plain("mlp.act_fn.eps")
    own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head")
    return decoder(c, lambda i: pre_norm(c, own, mlp, names=names))


def ernie4_5(c: Fields) -> Part:
    bias = c.use_bias
    return decoder(c, lambda i: pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), gated_mlp(c, bias=bias)))


def hunyuan(c: Fields) -> Part:
    bias, names = c.attention_bias, ("query_layernorm", "key_layernorm")
    own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", norm_names=names)
    return decoder(c, lambda i: pre_norm(c, own, gated_mlp(c)))


def exaone4(c: Fields) -> Part:
    """Norms after attention and MLP, and norms of heads; most layers may have a window."""
    types = exaone_kinds(c)

    def layer(i: int) -> Part:
        own = attention(c, qk_norms="head", window=window_of(c, types[i]))
        return pre_norm(c, own, gated_mlp(c), names=POST_NORMS)

    return decoder(c, layer)


def exaone_kinds(c: Fields) -> list[str]:
    """Every `sliding_window_pattern`-th layer has full attention, and all if there is no window."""
    pattern = c.sliding_window_pattern if c.sliding_window else 1
    return list(kinds(c, lambda i: "sliding_attention" if (i + 1) % pattern else "full_attention"))


def seed_oss(c: Fields) -> Part:
    own = attention(c, qkv_bias=c.attention_bias, out_bias=c.attention_out_bias)
    return decoder(c, lambda i: pre_norm(c, own, gated_mlp(c, bias=c.mlp_bias)))


def minicpm3(c: Fields) -> Part:
    """Latent attention in a dense model."""
    own = latent_attention(c, bias=c.attention_bias)
    return decoder(c, lambda i: pre_norm(c, own, gated_mlp(c, bias=c.get("mlp_bias"))))


def mllama(c: Fields) -> Part:
    """Layers that only attend to images keep nothing of text; eight rows of the embedding stand for images."""
    crossing = c.cross_attention_layers or [3, 8, 13, 18, 23, 28, 33, 38]

    def layer(i: int) -> Part:
        if i not in crossing:
            return pre_norm(c, attention(c, dim=_divided(c)), gated_mlp(c))
        own = attention(c, "cross_attn", qk_norms="head", dim=_divided(c))
        gates = plain("cross_attn_attn_gate", 1) + plain("cross_attn_mlp_gate", 1)
        return pre_norm(c, Part(own.weights), gates, gated_mlp(c))

    return decoder(c, layer, embedded=c.vocab_size + 8, tied=False)


def _divided(c: Fields) -> int:
    """The size of a head in classes that read no `head_dim`."""
    return int(c.hidden_size // c.num_attention_heads)


def gemma3n(c: Fields) -> Part:
    """Embeddings per layer, four alternative residual streams, and upper layers that read the cache of lower ones."""
    hidden, small, layers = c.hidden_size, c.hidden_size_per_layer_input, c.num_hidden_layers
    streams, rank, first_shared = c.altup_num_inputs, c.laurel_rank, layers - c.num_kv_shared_layers
    inner, bias = c.intermediate_size, c.attention_bias
    types = kinds(c, lambda i: "sliding_attention" if (i + 1) % 5 else "full_attention")

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", window=window_of(c, types[i]))
        if i >= first_shared:
            foreign = tuple(f"self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm"))
            own = Part(tuple(weight for weight in own.weights if not weight.name.startswith(foreign)))
        size = inner[i] if isinstance(inner, list) else inner
        return pre_norm(
            c, own, gated_mlp(c, inner=size), _gemma3n_streams(hidden, small, streams, rank), names=SANDWICH
        )

    extra = plain("embed_tokens_per_layer", c.vocab_size_per_layer_input, small * layers)
    extra += linear("per_layer_model_projection", hidden, small * layers)
    extra += norm("per_layer_projection_norm", small)
    for name in ("altup_projections", "altup_unembed_projections"):
        extra += stack(name, streams - 1, lambda i: plain("weight", hidden, hidden))
    return decoder(c, layer, extra=extra)


def _gemma3n_streams(hidden: int, small: int, streams: int, rank: int) -> Part:
    altup = plain("correct_output_scale", hidden) + linear("correction_coefs", streams, streams)
    altup += linear("prediction_coefs", streams, streams**2) + linear("modality_router", hidden, streams)
    altup += norm("router_norm", hidden)
    laurel = linear("linear_left", hidden, rank) + linear("linear_right", rank, hidden)
    laurel += norm("post_laurel_norm", hidden)
    inputs = linear("per_layer_input_gate", hidden, small) + linear("per_layer_projection", small, hidden)
    return altup.under("altup") + laurel.under("laurel") + inputs + norms(hidden, "post_per_layer_input_norm")

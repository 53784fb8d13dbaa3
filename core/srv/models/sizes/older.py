"""Families from before Llama: learned or no positions, layer norms, two linear layers per MLP."""

from __future__ import annotations

from srv.models.sizes.blocks import attention, decoder, pre_norm, two_layer_mlp
from srv.models.sizes.fields import Fields
from srv.models.sizes.parts import NOTHING, Part, linear, norm, plain, stack

GPT_NORMS = ("ln_1", "ln_2")


def gpt2(c: Fields) -> Part:
    """Keys and values are as many as the heads. Also GPTBigCode, with one of each for all heads."""
    keys = 1 if c.get("multi_query") else c.num_attention_heads
    inner = c.n_inner or 4 * c.hidden_size
    own = attention(c, "attn", qkv_bias=True, out_bias=True, fused="c_attn", out="c_proj", keys=keys)
    layer = pre_norm(c, own, two_layer_mlp(c, "mlp", inner, "c_fc", "c_proj", bias=True), names=GPT_NORMS, bias=True)
    return decoder(
        c, lambda i: layer, name="transformer", layers="h", embedding="wte", last_norm="ln_f", norm_bias=True,
        extra=plain("wpe", c.max_position_embeddings, c.hidden_size),
    )  # fmt: skip


def gptj(c: Fields) -> Part:
    inner = c.n_inner or 4 * c.hidden_size
    own = attention(c, "attn", out="out_proj", keys=c.num_attention_heads)
    layer = pre_norm(c, own, two_layer_mlp(c, "mlp", inner, "fc_in", "fc_out", bias=True), names=("ln_1",), bias=True)
    return decoder(
        c, lambda i: layer, name="transformer", layers="h", embedding="wte", last_norm="ln_f", norm_bias=True,
        head_bias=True,
    )  # fmt: skip


def gpt_neox(c: Fields) -> Part:
    bias = c.attention_bias
    own = attention(
        c, "attention", qkv_bias=bias, out_bias=bias, fused="query_key_value", out="dense", keys=c.num_attention_heads
    )
    mlp = two_layer_mlp(c, "mlp", c.intermediate_size, "dense_h_to_4h", "dense_4h_to_h", bias=True)
    return decoder(
        c, lambda i: pre_norm(c, own, mlp, bias=True), name="gpt_neox", embedding="embed_in",
        last_norm="final_layer_norm", norm_bias=True, head="embed_out",
    )  # fmt: skip


def opt(c: Fields) -> Part:
    """Two positions more than the context, and projections where the embedding is smaller than the layers."""
    hidden, small, bias = c.hidden_size, c.word_embed_proj_dim or c.hidden_size, c.enable_bias
    affine = c.layer_norm_elementwise_affine
    own = attention(c, qkv_bias=bias, out_bias=bias, out="out_proj", keys=c.num_attention_heads)
    layer = own + two_layer_mlp(c, "", c.ffn_dim, "fc1", "fc2", bias=bias)
    if affine:
        layer = pre_norm(c, layer, names=("self_attn_layer_norm", "final_layer_norm"), bias=True)
    extra = plain("embed_positions", c.max_position_embeddings + 2, hidden)
    if small != hidden:
        extra += linear("project_out", hidden, small) + linear("project_in", small, hidden)
    has_norm = c.do_layer_norm_before and not c.get("_remove_final_layer_norm") and affine
    embedding = plain("embed_tokens", c.vocab_size, small)
    own_norm = norm("final_layer_norm", hidden, bias=True) if has_norm else NOTHING
    body = embedding + extra + stack("layers", c.num_hidden_layers, lambda i: layer) + own_norm
    head = NOTHING if c.tie_word_embeddings else linear("lm_head", small, c.vocab_size)
    return body.under("model.decoder") + head


def xglm(c: Fields) -> Part:
    """Sinusoidal positions, which are computed."""
    own = attention(c, qkv_bias=True, out_bias=True, out="out_proj", keys=c.num_attention_heads)
    mlp = two_layer_mlp(c, "", c.ffn_dim, "fc1", "fc2", bias=True)
    layer = pre_norm(c, own, mlp, names=("self_attn_layer_norm", "final_layer_norm"), bias=True)
    return decoder(c, lambda i: layer, last_norm="layer_norm", norm_bias=True)


def bloom(c: Fields) -> Part:
    hidden = c.hidden_size
    own = attention(
        c, "self_attention", qkv_bias=True, out_bias=True, fused="query_key_value", out="dense",
        keys=c.num_attention_heads,
    )  # fmt: skip
    mlp = two_layer_mlp(c, "mlp", 4 * hidden, "dense_h_to_4h", "dense_4h_to_h", bias=True)
    return decoder(
        c, lambda i: pre_norm(c, own, mlp, bias=True), name="transformer", layers="h", embedding="word_embeddings",
        last_norm="ln_f", norm_bias=True, extra=norm("word_embeddings_layernorm", hidden, bias=True),
    )  # fmt: skip


def mpt(c: Fields) -> Part:
    """No biases, not even of layer norms."""
    own = attention(c, "attn", fused="Wqkv", out="out_proj", keys=c.num_attention_heads)
    mlp = two_layer_mlp(c, "ffn", 4 * c.hidden_size, "up_proj", "down_proj")
    layer = pre_norm(c, own, mlp, names=("norm_1", "norm_2"))
    return decoder(c, lambda i: layer, name="transformer", layers="blocks", embedding="wte", last_norm="norm_f")


def falcon(c: Fields) -> Part:
    """Attention and MLP in parallel or not, with one or two norms; one KV head, or some with the newer layers."""
    bias, newer, heads = c.bias, c.new_decoder_architecture, c.num_attention_heads
    keys = (c.num_kv_heads or heads) if newer else 1 if c.multi_query else heads
    own = attention(c, "self_attention", qkv_bias=bias, out_bias=bias, fused="query_key_value", out="dense", keys=keys)
    inner = c.ffn_hidden_size or 4 * c.hidden_size
    mlp = two_layer_mlp(c, "mlp", inner, "dense_h_to_4h", "dense_4h_to_h", bias=bias)
    count = (2 if newer else 1) if c.num_ln_in_parallel_attn is None else c.num_ln_in_parallel_attn
    in_parallel = ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
    names = in_parallel if c.parallel_attn else ("input_layernorm", "post_attention_layernorm")
    return decoder(
        c, lambda i: pre_norm(c, own, mlp, names=names, bias=True), name="transformer", layers="h",
        embedding="word_embeddings", last_norm="ln_f", norm_bias=True,
    )  # fmt: skip

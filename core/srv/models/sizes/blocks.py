"""The blocks that families share: attention, latent attention, recurrent layers, MLPs, experts and the decoder.

Each function makes one `Part` from the fields of a configuration; its options are what families do differently. Field
names are those of transformers. This module must not know any family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from srv.models.sizes.fields import Fields
from srv.models.sizes.parts import NOTHING, Part, UnknownSizes, Weight, linear, norm, norms, plain, stack, total
from srv.specs import CacheSpec, FullAttention, Latent, Recurrent, SlidingWindow, StateTensor

LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
Norms = Literal["none", "head", "all"]  # of queries and keys: one of a head's size, or of all heads'


def head_dim(c: Fields) -> int:
    """The size of a head: stated, or the hidden size divided among the heads."""
    return int(c.get("head_dim") or c.hidden_size // c.num_attention_heads)


def kv_heads(c: Fields) -> int:
    return int(c.get("num_key_value_heads") or c.num_attention_heads)


def heads_cache(heads: int, key_dim: int, value_dim: int, window: int | None = None) -> Part:
    """A key and a value per token and KV head; with a window, of its last tokens only."""
    cache: CacheSpec = FullAttention((), heads, key_dim, value_dim)
    return Part((), (SlidingWindow((), heads, key_dim, value_dim, window) if window else cache,))


def attention(
    c: Fields,
    name: str = "self_attn",
    *,
    qkv_bias: object = False,
    out_bias: object = False,
    qk_norms: Norms = "none",
    norm_names: tuple[str, str] = ("q_norm", "k_norm"),
    norm_bias: object = False,
    window: int | None = None,
    fused: str | None = None,
    out: str = "o_proj",
    heads: int | None = None,
    keys: int | None = None,
    dim: int | None = None,
    value_dim: int | None = None,
    gated: bool = False,
) -> Part:
    """Attention with a key and a value per KV head.

    `fused`: the name of one linear layer of queries, keys and values. `gated`: queries have a gate of their size.
    `heads`, `keys`, `dim`, `value_dim`: query heads, KV heads and sizes of their vectors, if not the usual ones.
    """
    hidden, heads = c.hidden_size, heads or c.num_attention_heads
    keys, dim = keys or kv_heads(c), dim or head_dim(c)
    values = value_dim or dim
    rows = {"q_proj": heads * dim * (1 + gated), "k_proj": keys * dim, "v_proj": keys * values}
    if fused:
        projections = linear(fused, hidden, sum(rows.values()), qkv_bias)
    else:
        projections = total(linear(each, hidden, size, qkv_bias) for each, size in rows.items())
    sizes = {"none": (), "head": (dim, dim), "all": (heads * dim, keys * dim)}[qk_norms]
    of_heads = total(norm(each, size, norm_bias) for each, size in zip(norm_names, sizes, strict=False))
    own = projections + linear(out, heads * values, hidden, out_bias) + of_heads
    return own.under(name) + heads_cache(keys, dim, values, window)


def latent_attention(
    c: Fields, *, bias: object = False, extra: Part = NOTHING, index_dim: int = 0, gated: bool = False
) -> Part:
    """Multi-head latent attention (DeepSeek-V2): a token keeps one compressed vector and one rotary key per layer.

    `extra`: the indexer of the layer, if it has one; `index_dim`: the size of the index keys of the model. `gated`:
    beside each query there is a gate, and both follow from the compressed queries with and without their norm (A.X-K2).
    """
    hidden, heads, rank, rope = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
    query, value = heads * (c.qk_nope_head_dim + rope), c.v_head_dim or hidden // heads
    own = (
        linear("q_a_proj", hidden, c.q_lora_rank, bias)
        + norm("q_a_layernorm", c.q_lora_rank)
        + linear("q_b_proj", c.q_lora_rank * (1 + gated), query + heads * value * gated)
        if c.q_lora_rank
        else linear("q_proj", hidden, query)
    )
    own += linear("kv_a_proj_with_mqa", hidden, rank + rope, bias) + norm("kv_a_layernorm", rank)
    own += linear("kv_b_proj", rank, heads * (c.qk_nope_head_dim + value))
    own += linear("o_proj", heads * value, hidden, bias) + extra
    indexed = (0,) if extra.weights else ()  # numbered with the layer
    return own.under("self_attn") + Part((), (Latent((), rank, rope, index_dim=index_dim, indexed=indexed),))


def gated_mlp(
    c: Fields, name: str = "mlp", inner: int | None = None, *, bias: object = False, fused: bool = False
) -> Part:
    """An MLP whose inner activations are multiplied by a gate. `fused`: gate and up are one linear layer."""
    hidden, inner = c.hidden_size, c.intermediate_size if inner is None else inner
    first = (
        linear("gate_up_proj", hidden, 2 * inner, bias)
        if fused
        else linear("gate_proj", hidden, inner, bias) + linear("up_proj", hidden, inner, bias)
    )
    return (first + linear("down_proj", inner, hidden, bias)).under(name)


def two_layer_mlp(c: Fields, name: str, inner: int, up: str, down: str, *, bias: object = False) -> Part:
    """An MLP of two linear layers without a gate. `name`: "" if the layers have no module of their own."""
    own = linear(up, c.hidden_size, inner, bias) + linear(down, inner, c.hidden_size, bias)
    return own.under(name) if name else own


def experts(hidden: int, inner: int, count: int, used: int, *, gated: bool = True, name: str = "experts.0") -> Part:
    """The routed experts of a layer, each an MLP, of which a token uses `used`."""
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    names = shapes if gated else ("up_proj", "down_proj")
    return Part(tuple(Weight(f"{name}.{each}", shapes[each], "expert", count, min(used, count)) for each in names))


def moe(
    c: Fields,
    *,
    count: int,
    inner: int,
    used: int,
    shared: int = 0,
    router: str = "gate",
    correction: bool = False,
    name: str = "mlp",
    shared_name: str = "shared_experts",
    shared_bias: object = False,
) -> Part:
    """A router and its experts, with an MLP of inner size `shared` beside them that every token passes.

    `correction`: the router has a stored bias per expert.
    """
    own = plain(router, count, c.hidden_size) + experts(c.hidden_size, inner, count, used)
    own += plain(f"{router}.e_score_correction_bias", count) if correction else NOTHING
    own += gated_mlp(c, shared_name, shared, bias=shared_bias) if shared else NOTHING
    return own.under(name)


def decoder(
    c: Fields,
    layer: Callable[[int], Part],
    *,
    name: str = "model",
    layers: str = "layers",
    embedding: str = "embed_tokens",
    embedded: int | None = None,
    last_norm: str | None = "norm",
    norm_bias: object = False,
    head: str = "lm_head",
    head_bias: object = False,
    tied: object = None,
    extra: Part = NOTHING,
    count: int | None = None,
) -> Part:
    """Embedding, layers, last norm and output layer.

    `embedded`: the rows of the embedding, if not those of the vocabulary. `tied`: the output layer is the embedding; by
    default as stated. `count`: the layers, if not the stated number.
    """
    hidden, vocab = c.hidden_size, c.vocab_size
    body = plain(embedding, vocab if embedded is None else embedded, hidden) + extra
    body += stack(layers, c.num_hidden_layers if count is None else count, layer)
    body += norm(last_norm, hidden, norm_bias) if last_norm else NOTHING
    shared = c.tie_word_embeddings if tied is None else tied
    output = linear(head, hidden, vocab, head_bias)
    if shared:
        output = Part(output.weights[1:])  # a bias is not shared
    return (body.under(name) if name else body) + output


def state_cache(c: Fields, conv: tuple[int, int] | None, recurrent: tuple[int, ...] | None = None) -> Part:
    """What a recurrent layer keeps per request: the inputs of a convolution ``[channels, width]``, and a state.

    The inputs have the dtype of the model. The state is float32, as the recurrence is computed.
    """
    states = [] if conv is None else [StateTensor("conv", conv, c.dtype_name)]
    if recurrent is not None:
        states.append(StateTensor("state", recurrent, "float32"))
    return Part((), (Recurrent((), tuple(states)),))


def mamba2(
    c: Fields,
    name: str,
    *,
    inner: int,
    heads: int,
    state: int,
    groups: int,
    width: int,
    conv_bias: object,
    bias: object = False,
    out_bias: object = None,
    gate_norm: object = True,
) -> Part:
    """A Mamba-2 mixer. `inner`: the sum of its heads' sizes. `width`: that of the convolution over time."""
    hidden, channels = c.hidden_size, inner + 2 * groups * state
    own = linear("in_proj", hidden, inner + channels + heads, bias) + plain("conv1d", channels, 1, width)
    own += (plain("conv1d.bias", channels) if conv_bias else NOTHING) + plain("dt_bias", heads)
    own += plain("A_log", heads) + plain("D", heads) + (norm("norm", inner) if gate_norm else NOTHING)
    own += linear("out_proj", inner, hidden, bias if out_bias is None else out_bias)
    return own.under(name) + state_cache(c, (channels, width), (heads, inner // heads, state))


def mamba1(
    c: Fields, name: str, *, inner: int, state: int, rank: int, width: int, conv_bias: object, bias: object, extra: Part
) -> Part:
    """A Mamba mixer. `rank`: of the projection of time steps."""
    own = linear("in_proj", c.hidden_size, 2 * inner, bias) + plain("conv1d", inner, 1, width)
    own += (plain("conv1d.bias", inner) if conv_bias else NOTHING) + plain("A_log", inner, state) + plain("D", inner)
    own += linear("x_proj", inner, rank + 2 * state) + linear("dt_proj", rank, inner, bias=True)
    own += linear("out_proj", inner, c.hidden_size, bias) + extra
    return own.under(name) + state_cache(c, (inner, width), (inner, state))


def kinds(c: Fields, default: Callable[[int], str]) -> Sequence[str]:
    """The kind of each layer: `layer_types`, else `default` of its index."""
    count, stated = c.num_hidden_layers, c.get("layer_types")
    if stated is None:
        return [default(index) for index in range(count)]
    if len(stated) < count:
        raise UnknownSizes(f"layer_types has {len(stated)} entries for {count} layers")
    return list(stated)


def window_of(c: Fields, kind: str) -> int | None:
    """The window of a layer of this kind."""
    window: Any = c.get("sliding_window") if kind == "sliding_attention" else None
    return None if window is None else int(window)


def pre_norm(c: Fields, *parts: Part, names: Sequence[str] = LLAMA_NORMS, bias: object = False) -> Part:
    """A layer of these parts, with the two norms of Llama or others."""
    return total(iter(parts)) + norms(c.hidden_size, *names, bias=bias)

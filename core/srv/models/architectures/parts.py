"""The parts that decoders have in common, from their sizes. Torch-free; names are those of the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from srv.models.blueprint import (
    GATED,
    MLP,
    Activation,
    Attention,
    Decoder,
    DecoderStack,
    Embedding,
    Experts,
    Factors,
    HeadNorms,
    Layer,
    Linear,
    Made,
    Mixer,
    MoE,
    Norm,
    Output,
    Part,
    Tensors,
    alike,
)
from srv.models.layers.moe_config import ROUTER, MoEConfig
from srv.models.layers.rope_config import RopeConfig

if TYPE_CHECKING:
    from srv.models.architectures.decoder_config import DecoderConfig

Kind = TypeVar("Kind")
BEFORE_MIXER, BEFORE_MLP = "input_layernorm", "post_attention_layernorm"  # the norms of Llama


def attention(
    sizes: DecoderConfig,
    index: int,
    *,
    name: str = "self_attn",
    rope: RopeConfig | None = None,
    wide: bool = False,
    head_norms: tuple[HeadNorms, HeadNorms] | None = None,
    gated_queries: bool = False,
    head_gates: bool = False,
) -> Attention:
    """That of layer `index`. `rope`: None for that of `sizes`. `wide`: of the norms of queries and keys.

    `gated_queries`: each query is followed by a gate of its size. `head_gates`: each head has a gate.
    """
    dim, hidden = sizes.head_dim, sizes.hidden_size
    queries, keys, values = sizes.qkv_parts
    rope = (rope or sizes.rope) if sizes.rotated[index] else None
    q_norm: Norm | HeadNorms | None
    k_norm: Norm | HeadNorms | None
    q_norm = k_norm = None
    if head_norms is not None:
        q_norm, k_norm = head_norms
    elif sizes.qk_norm:
        of_queries, of_keys = (queries, keys) if sizes.wide_qk_norm else (dim, dim)
        q_norm = Norm(of_queries, sizes.norm_eps, wide=wide, name="q_norm")
        k_norm = Norm(of_keys, sizes.norm_eps, wide=wide, name="k_norm")
    outputs = {"q_proj": queries * (1 + gated_queries), "k_proj": keys, "v_proj": values}
    return Attention(
        Linear(outputs, hidden, sizes.qkv_bias, split="out", unit=dim),
        Linear({"o_proj": hidden}, queries, sizes.output_bias, split="in"),
        sizes.heads,
        sizes.kv_heads,
        dim,
        sizes.attention_scale,
        rope,
        q_norm,
        k_norm,
        Norm(dim, sizes.norm_eps, learned=False) if sizes.unit_rotated and rope is not None else None,
        Linear({"gate_proj": sizes.heads}, hidden) if head_gates else None,
        Tensors({"sinks": (sizes.heads,)}, divided=True) if sizes.sinks else None,
        sizes.windows[index],
        sizes.chunks[index] if sizes.chunks else None,
        sizes.attention_soft_cap,
        sizes.alibi_slopes,
        gated_queries=gated_queries,
        temperature=sizes.temperature if rope is None else None,
        name=name,
    )


def mlp(hidden: int, inner: int, bias: bool = False, activation: Activation = "silu_gated", name: str = "mlp") -> MLP:
    first = ("gate_proj", "up_proj") if activation in GATED else ("up_proj",)
    up = Linear(dict.fromkeys(first, inner), hidden, bias, split="out")
    return MLP(up, Linear({"down_proj": hidden}, inner, bias, split="in"), activation, name=name)


def mixture(moe: MoEConfig, hidden: int, name: str = "mlp") -> MoE:
    """A router and its experts, with the MLP beside them that every token passes."""
    bias = Tensors({f"{moe.router}.e_score_correction_bias": (moe.experts,)}) if moe.routing.bias else None
    shared = mlp(hidden, moe.shared_intermediate, name=moe.shared) if moe.shared_intermediate else None
    gate = Linear({f"{moe.shared}_gate": 1}, hidden) if shared is not None and moe.shared_gate else None
    router = Linear({moe.router: moe.experts}, hidden, moe.router_bias, role=ROUTER)
    sizes = (moe.experts, moe.routing.top_k, hidden, moe.intermediate)
    experts = Experts(*sizes, moe.expert_bias, moe.activation, name="experts")
    return MoE(router, bias, shared, gate, experts, moe.routing, moe.scales_inputs, name=name)


def feed_forward(sizes: DecoderConfig, moe: MoEConfig | None) -> MLP | MoE:
    """A mixture of experts or, for None, an MLP of the sizes."""
    if moe is None:
        return mlp(sizes.hidden_size, sizes.intermediate_size, sizes.mlp_bias)
    return mixture(moe, sizes.hidden_size)


def pre_norm(
    sizes: DecoderConfig,
    mixer: Mixer,
    feeding: MLP | MoE,
    *,
    names: tuple[str, str] = (BEFORE_MIXER, BEFORE_MLP),
    adds: bool = True,
    wide: bool = False,
) -> Layer:
    """A layer with a norm before each of its two parts. `adds`, `wide`: of these norms."""
    before, between = (Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, wide=wide, name=name) for name in names)
    factors = Factors(added=sizes.residual_multiplier)
    return Layer((before,), (mixer,), (between,), feeding, mixer_factors=factors, factors=factors)


def layers(kinds: Sequence[Kind], make: Callable[[int], Made]) -> tuple[Made, ...]:
    """`make(index)` for the first layer of each kind; equal kinds are one object."""
    return alike(kinds, lambda kind: make(kinds.index(kind)))


def last_norm(sizes: DecoderConfig, *, adds: bool = True, wide: bool = False) -> Norm:
    return Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, wide=wide, name="norm")


def decoder(
    sizes: DecoderConfig,
    layers: tuple[Part, ...],
    *after: Part,
    before: tuple[Part, ...] = (),
    output_bias: bool = False,
    factor_dtype: str | None = None,
) -> Decoder:
    """The model around its layers. `after`: the last norm, and what precedes it. `factor_dtype`: of `DecoderStack`."""
    hidden, vocab, factor = sizes.hidden_size, sizes.vocab_size, sizes.embedding_multiplier
    embedding = Embedding(vocab, hidden, name="embed_tokens")
    return Decoder(
        DecoderStack(embedding, layers, before, after, factor, factor_dtype, name="model"),
        Output({"lm_head": vocab}, hidden, split="out", tied=sizes.tied_embeddings),
        Tensors({"lm_head.bias": (vocab,)}, divided=True) if output_bias else None,
        logits_divisor=sizes.logits_divisor,
        logits_soft_cap=sizes.logits_soft_cap,
    )

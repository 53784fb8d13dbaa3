"""The parts that decoders have in common, from their sizes. Torch-free; names are those of the layers.

What a family has otherwise is an argument of the part that it concerns. Must not know any family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

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
    JointNorm,
    Layer,
    Linear,
    Mixer,
    MoE,
    Norm,
    Output,
    Part,
    SinglePartLayer,
    SkipConnection,
    Temperature,
    Tensors,
    alike,
)
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.layer_types import check_experts
from srv.models.layers.moe_config import ROUTER, ExpertActivation, Routing
from srv.models.layers.rope_config import RopeConfig

Each = TypeVar("Each", bound=Part)
FeedForward: TypeAlias = MLP | MoE
QueryKeyNorms: TypeAlias = tuple[Norm, Norm] | tuple[HeadNorms, HeadNorms]
BEFORE_MIXER, BEFORE_MLP = "input_layernorm", "post_attention_layernorm"  # the norms of Llama


def attention(
    sizes: Sizes,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    norms: QueryKeyNorms | None = None,
    rotated: bool = True,
    rope: RopeConfig | None = None,
    unit_norm: bool = False,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    alibi: tuple[float, ...] | None = None,
    temperature: Temperature | None = None,
    sinks: bool = False,
    gated_queries: bool = False,
    head_gates: bool = False,
    gated: bool = False,
    norms_rotated: bool = False,
    name: str = "self_attn",
) -> Attention:
    """Grouped-query attention. `bias`: of all projections; `output_bias`: of that of the result, None for the same.

    `norms`: of queries and keys. `rope`: None for that of `sizes`, if the layer is `rotated`. `unit_norm`: rotated
    queries and keys are divided by their root mean square. `scale`: None for 1 / sqrt(head_dim). `head_gates`: each
    head has a gate; `gated`: each element of its result. The others are fields of `Attention`.
    """
    heads, keys, dim, hidden = sizes.heads, sizes.kv_heads * sizes.head_dim, sizes.head_dim, sizes.hidden_size
    q_norm, k_norm = norms or (None, None)
    outputs = {"q_proj": heads * dim * (1 + gated_queries), "k_proj": keys, "v_proj": keys}
    gate = Linear({"gate_proj": heads}, hidden, split="out") if head_gates else None
    return Attention(
        Linear(outputs, hidden, bias, split="out", unit=dim),
        Linear({"o_proj": hidden}, heads * dim, bias if output_bias is None else output_bias, split="in"),
        heads,
        sizes.kv_heads,
        dim,
        dim**-0.5 if scale is None else scale,
        (rope or sizes.rope) if rotated else None,
        q_norm,
        k_norm,
        Norm(dim, sizes.norm_eps, learned=False) if unit_norm else None,
        Linear({"gate_proj": heads * dim}, hidden, split="out", unit=dim) if gated else gate,
        Tensors({"sinks": (heads,)}, divided=True) if sinks else None,
        window,
        chunk,
        soft_cap,
        alibi,
        gated_queries=gated_queries,
        temperature=temperature,
        norms_rotated=norms_rotated,
        name=name,
    )


def head_norms(sizes: Sizes, *, wide: bool = False) -> tuple[Norm, Norm]:
    """RMS norms of each query and key head, before the rotation. `wide`: as of `Norm`."""
    q_norm, k_norm = (Norm(sizes.head_dim, sizes.norm_eps, wide=wide, name=name) for name in ("q_norm", "k_norm"))
    return q_norm, k_norm


def joint_norms(sizes: Sizes) -> tuple[JointNorm, JointNorm]:
    """RMS norms of the queries and the keys of all heads together."""
    dim, eps, queries, keys = sizes.head_dim, sizes.norm_eps, sizes.heads, sizes.kv_heads
    q_norm = JointNorm(queries * dim, eps, heads=queries, name="q_norm")
    return q_norm, JointNorm(keys * dim, eps, heads=keys, name="k_norm")


def mlp(
    sizes: Sizes,
    bias: bool = False,
    activation: Activation = "silu_gated",
    *,
    inner: int | None = None,
    sparsity: float = 0.0,
    name: str = "mlp",
) -> MLP:
    """`inner`: the elements of a token between the projections; None for those of `sizes`. `sparsity`: as of `MLP`."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size if inner is None else inner
    first = ("gate_proj", "up_proj") if activation in GATED else ("up_proj",)
    up = Linear(dict.fromkeys(first, inner), hidden, bias, split="out")
    return MLP(up, Linear({"down_proj": hidden}, inner, bias, split="in"), activation, sparsity=sparsity, name=name)


def mixture(
    sizes: Sizes,
    count: int,
    inner: int,
    routing: Routing,
    *,
    shared: int = 0,
    shared_gate: bool = False,
    shared_name: str = "shared_expert",
    shared_activation: Activation = "silu_gated",
    activation: ExpertActivation = "silu",
    bias: bool = False,
    router: str = "gate",
    router_bias: bool = False,
    scales_inputs: bool = False,
    name: str = "mlp",
) -> MoE:
    """A router and `count` experts of size `inner`, with the MLP of size `shared` beside them that every token passes.

    `shared_gate`: the sigmoid of a gate multiplies its result. `bias`: of the experts. `router`: its name.
    """
    hidden = sizes.hidden_size
    if count > 0:  # else the tree is refused by the field that says so
        check_experts(routing.top_k, count)
    correction = Tensors({f"{router}.e_score_correction_bias": (count,)}) if routing.bias else None
    every = mlp(sizes, activation=shared_activation, inner=shared, name=shared_name) if shared else None
    gate = Linear({f"{shared_name}_gate": 1}, hidden) if every is not None and shared_gate else None
    chooses = Linear({router: count}, hidden, router_bias, role=ROUTER)
    experts = Experts(count, routing.top_k, hidden, inner, bias, activation, name="experts")
    return MoE(chooses, correction, every, gate, experts, routing, scales_inputs=scales_inputs, name=name)


def pre_norm(
    sizes: Sizes,
    mixer: Mixer,
    feeding: FeedForward,
    *,
    names: tuple[str, str] = (BEFORE_MIXER, BEFORE_MLP),
    adds: bool = True,
    wide: bool = False,
    factor: float = 1.0,
) -> Layer:
    """A layer with a norm before each of its two parts. `adds`, `wide`: of these norms. `factor`: multiplies what both
    parts add to the residual."""
    before, between = (Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, wide=wide, name=name) for name in names)
    factors = Factors(added=factor)
    return Layer((before,), (mixer,), (between,), feeding, mixer_factors=factors, factors=factors)


def pre_norm_layers(
    sizes: Sizes,
    mixers: Mixer | Sequence[Mixer],
    feeding: FeedForward | Sequence[FeedForward],
    *,
    wide: bool = False,
    factor: float = 1.0,
) -> tuple[Layer, ...]:
    """The layers of a model, as `pre_norm` makes them, from parts that all of them have or from those of each."""
    kinds = zip(of_layers(sizes, mixers), of_layers(sizes, feeding), strict=True)
    return alike(kinds, lambda kind: pre_norm(sizes, *kind, wide=wide, factor=factor))


def single_part_layers(sizes: Sizes, each: Sequence[Part]) -> tuple[SinglePartLayer, ...]:
    """The layers of a model, each of which is one part after a norm."""
    norm = Norm(sizes.hidden_size, sizes.norm_eps, adds=True, name="norm")
    return alike(each, lambda part: SinglePartLayer(norm, part))


def of_layers(sizes: Sizes, part: Each | Sequence[Each]) -> Sequence[Each]:
    """The part of each layer, where all layers have the same one."""
    return (part,) * sizes.layers if isinstance(part, Part) else part


def last_norm(sizes: Sizes, *, adds: bool = True, wide: bool = False) -> Norm:
    return Norm(sizes.hidden_size, sizes.norm_eps, adds=adds, wide=wide, name="norm")


def decoder(
    sizes: Sizes,
    layers: tuple[Part, ...],
    *after: Part,
    before: tuple[Part, ...] = (),
    output_bias: bool = False,
    factor: float = 1.0,
    factor_dtype: str | None = None,
    skips: tuple[SkipConnection, ...] = (),
    logits_divisor: float = 1.0,
    logits_soft_cap: float | None = None,
) -> Decoder:
    """The model around its layers. `after`: the last norm, and what precedes it; `last_norm` if there is nothing.

    The others are fields of `DecoderStack` and `Decoder`.
    """
    hidden, vocab = sizes.hidden_size, sizes.vocab_size
    embedding, after = Embedding(vocab, hidden, name="embed_tokens"), after or (last_norm(sizes),)
    return Decoder(
        DecoderStack(embedding, layers, before, after, factor, factor_dtype, skips, name="model"),
        Output({"lm_head": vocab}, hidden, split="out", tied=sizes.tied_embeddings),
        Tensors({"lm_head.bias": (vocab,)}, divided=True) if output_bias else None,
        logits_divisor=logits_divisor,
        logits_soft_cap=logits_soft_cap,
    )

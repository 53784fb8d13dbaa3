"""What a model is made of: a tree of named parts. Torch-free.

A family makes the tree from the fields of its configuration, once. Everything else that is known of a model before it
is built is a walk over the tree (`srv.models.derive`): parameters, matrices, attention, the ops that layers call, the
part of one rank. Must not know any family, nor how weights are stored.

    Decoder ─┬─ Embedding  model.embed_tokens
             ├─ layers[i] ─┬─ Norm       input_layernorm
             │             ├─ Attention  model.layers.i.self_attn ─┬─ Linear  q_proj, k_proj, v_proj
             │             │                                       └─ Linear  o_proj
             │             ├─ Norm       post_attention_layernorm
             │             └─ MLP        model.layers.i.mlp ─ ...
             ├─ Norm       model.norm
             └─ Output     lm_head

Names are those that layers have for the weights; what checkpoints call them is a family's table of names. Parts do not
know their layer's number, so that layers which are alike are one object.

What several ranks divide says so: `Linear.split`, `Tensors.divided`, the heads of attention and of `JointNorm`,
experts' sizes. `Part.divided_sizes` says which sizes must allow it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

from srv import specs
from srv.dist.mesh import Axis
from srv.models.checkpoints.slices import Section, Sections, size_of_rank
from srv.models.layers.moe_config import DOWN, SPARSE_MIXER, ExpertActivation, Routing, first_projections
from srv.models.layers.rope_config import RopeConfig
from srv.specs import AttentionLayer, CacheSpec, FullAttention, SlidingWindow, StateTensor

Kind = TypeVar("Kind")
Made = TypeVar("Made")

NORM, ADD_NORM, LAYER_NORM, ROTARY = "rms_norm", "add_rms_norm", "layer_norm", "rotary"
JOINT_NORM = "joint_rms_norm"
SILU, GELU, ROUTE = "silu_and_mul", "gelu_tanh_and_mul", "route_experts"
TORCH = "torch's operator"
WIDE = "float32"
INTERMEDIATE = "units of intermediate size"
_FLOAT32 = 4  # bytes

# "..._gated": the product of an activation of one half, the gate, and the other one.
Activation: TypeAlias = Literal[
    "silu_gated", "gelu_tanh_gated", "gelu_gated", "gelu", "gelu_tanh", "relu", "tanh", "relu2", "xielu"
]
GATED: tuple[Activation, ...] = ("silu_gated", "gelu_tanh_gated", "gelu_gated")
Split: TypeAlias = Literal["out", "in", "sum"]
Order: TypeAlias = Literal["sequence", "parallel", "normed_residual", "streams", "altup", "scaled"]


class Temperature(NamedTuple):
    """A factor for queries that grows with their position: 1 + scale ln(1 + floor((position + first) / step)).

    `first`: the number of the first position.
    """

    step: float
    scale: float
    first: int = 1


class Factors(NamedTuple):
    """By which the residual (`kept`), and what is added to it, are multiplied."""

    kept: float = 1.0
    added: float = 1.0


class SkipConnection(NamedTuple):
    """The residual that layer `target` reads: `share` of that before layer `source`, and the rest of its own."""

    source: int
    target: int
    share: float


class Weight(NamedTuple):
    """One tensor. `name`: below the name of its part."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class OpUse(NamedTuple):
    """An op that layers call.

    `dtype`: None for the model's. `own`: what the layers use without an implementation, such as "torch's operator"; ""
    if they cannot do without. `always_own`: they use it on every platform.
    """

    op: str
    sizes: Mapping[str, int]
    dtype: str | None = None
    own: str = ""
    always_own: bool = False


class DividedSize(NamedTuple):
    """A number of things, such as heads, that are divided among ranks. `name`: of them, in the plural.

    `along`: the axis of a mesh whose ranks divide them. `copied`: where there are fewer than ranks, several ranks have
    copies.
    """

    name: str
    size: int
    along: Axis = "heads"
    copied: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a model. Its fields are its sizes and the parts within it; a tuple of parts is numbered from 0.

    `name`: below that of the part around it; "" if the weights stand directly below that one.
    """

    name: str = field(default="", kw_only=True)

    def parts(self) -> Iterator[tuple[str, Part]]:
        """The parts directly within this one, in order, each with its name below this one's."""
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Part):
                yield value.name, value
            elif isinstance(value, tuple):
                numbered = enumerate(value)
                yield from ((f"{each.name}.{index}", part) for index, part in numbered if isinstance(part, Part))

    def weights(self) -> Iterator[Weight]:
        """The weights of this part itself."""
        return iter(())

    @functools.cached_property
    def within(self) -> tuple[tuple[str, Part], ...]:
        """The part and everything within it, from the outside in, each with its name below this one's."""
        inner = ((name, each) for name, part in self.parts() for name, each in _renamed(part.within, name))
        return (("", self), *inner)

    @functools.cached_property
    def elements(self) -> int:
        """The number of parameters of this part itself."""
        return sum(weight.elements for weight in self.weights())

    @functools.cached_property
    def projected(self) -> int:
        """Those of them in matrices of linear layers, without heads."""
        return 0

    def ops(self, dtype: str) -> Iterator[OpUse]:
        """What the layer of this part calls itself, beside the products with matrices. `dtype`: of the model."""
        return iter(())

    def cache(self, dtype: str) -> CacheSpec | None:
        """What a layer keeps per token, or per request, for this part, without the number of the layer; None for none.

        `dtype`: of the model.
        """
        return None

    def divided_sizes(self) -> Iterator[DividedSize]:
        """The sizes that a number of ranks must divide, if the model is divided among them."""
        return iter(())

    def of_rank(self, ranks: int) -> Self:
        """What the first of `ranks` ranks has of it: of the parts within, unless a kind of part says more."""
        changes: dict[str, Any] = {}
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Part):
                changes[each.name] = value.of_rank(ranks)
            elif isinstance(value, tuple) and value and isinstance(value[0], Part):
                changes[each.name] = alike(value, lambda part: part.of_rank(ranks))
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Linear(Part):
    """y = x Wᵀ + b, of one or more linear layers of a checkpoint. `outputs`: of each, by its name.

    `split`: the axis that is divided among ranks, None for a copy on each, "sum" for a copy on each whose inputs are
    partial sums. Outputs are divided in units of `unit` (heads); units are copied where there are fewer than ranks.
    `sections`: those of each output, or of the inputs, if they are more than one in a matrix of a checkpoint; ()
    otherwise. `role`: as `OpLayer.role`.
    """

    outputs: Mapping[str, int]
    inputs: int
    bias: bool = False
    split: Split | None = None
    unit: int = 1
    role: str = ""
    sections: tuple[Sections, ...] = ()

    def weights(self) -> Iterator[Weight]:
        for name, size in self.outputs.items():
            yield Weight(f"{name}.weight", (size, self.inputs))
            if self.bias:
                yield Weight(f"{name}.bias", (size,))

    @functools.cached_property
    def projected(self) -> int:
        return 0 if self.role else self.inputs * sum(self.outputs.values())

    def of_rank(self, ranks: int) -> Self:
        if self.split == "in":
            (sections,) = self.all_sections
            return dataclasses.replace(self, inputs=size_of_rank(sections, ranks), sections=())
        if self.split == "out":
            sizes = (size_of_rank(sections, ranks) for sections in self.all_sections)
            return dataclasses.replace(self, outputs=dict(zip(self.outputs, sizes, strict=True)), sections=())
        return self

    @property
    def all_sections(self) -> tuple[Sections, ...]:
        """Those of each output, or of the inputs if these are divided."""
        sizes = (self.inputs,) if self.split == "in" else self.outputs.values()
        return self.sections or tuple((Section(size, self.unit),) for size in sizes)


@dataclass(frozen=True)
class Output(Linear):
    """A linear layer behind the last one of the model: of a head, or to the vocabulary.

    `tied`: its matrix is that of the embedding.
    """

    tied: bool = False

    def weights(self) -> Iterator[Weight]:
        return (each for each in super().weights() if not (self.tied and each.name.endswith(".weight")))

    @functools.cached_property
    def projected(self) -> int:
        return 0


@dataclass(frozen=True)
class Tensors(Part):
    """Other weights, by their names. `divided`: each rank has a part of their first axis, which consists of `sections`
    in the tensors of these names.

    `projects`: they are the matrices of linear layers that no layer multiplies by as they are.
    """

    shapes: Mapping[str, tuple[int, ...]]
    divided: bool = False
    projects: bool = False
    sections: Mapping[str, Sections] = field(default_factory=dict)

    def sections_of(self, name: str) -> Sections:
        """Those of a tensor that is divided; () of one of which each rank has a copy."""
        return (self.sections.get(name) or (Section(self.shapes[name][0]),)) if self.divided else ()

    def weights(self) -> Iterator[Weight]:
        return (Weight(name, shape) for name, shape in self.shapes.items())

    @functools.cached_property
    def projected(self) -> int:
        return self.elements if self.projects else 0

    def of_rank(self, ranks: int) -> Self:
        if not self.divided:
            return self
        sizes = {name: size_of_rank(self.sections_of(name), ranks) for name in self.shapes}
        shapes = {name: (sizes[name], *rest) for name, (_, *rest) in self.shapes.items()}
        return dataclasses.replace(self, shapes=shapes, sections={})


@dataclass(frozen=True)
class Norm(Part):
    """An RMS norm, or a layer norm, which may have a bias.

    `adds`: it is also computed together with an addition to the residual. `wide`: it multiplies by 1 + weight, an RMS
    norm in float32 (Gemma), a layer norm in the model's dtype (Nemotron). `learned`: it has a weight.
    """

    size: int
    eps: float
    rms: bool = True
    bias: bool = False
    adds: bool = False
    wide: bool = False
    learned: bool = True

    def weights(self) -> Iterator[Weight]:
        if self.learned:
            yield Weight("weight", (self.size,))
        if self.bias:
            yield Weight("bias", (self.size,))

    def ops(self, dtype: str) -> Iterator[OpUse]:
        sizes = {"dim": self.size}
        if not self.rms:
            yield torch_op(LAYER_NORM, self.size)
            return
        yield OpUse(NORM, sizes, WIDE, own=TORCH) if self.wide else OpUse(NORM, sizes)
        if self.adds and (not self.wide or dtype == WIDE):  # rounded between the two in other dtypes
            yield OpUse(ADD_NORM, sizes, WIDE if self.wide else None)


@dataclass(frozen=True)
class JointNorm(Norm):
    """An RMS norm of the queries, or of the keys, of all heads of a token together.

    Each of several `ranks` has the weights of its heads; they add up the squares of all heads.
    """

    heads: int = 1
    ranks: int = 1

    def ops(self, dtype: str) -> Iterator[OpUse]:
        return super().ops(dtype) if self.ranks == 1 else iter((torch_op(JOINT_NORM, self.size),))

    def of_rank(self, ranks: int) -> Self:
        heads = max(1, self.heads // ranks)
        return dataclasses.replace(self, size=self.size // self.heads * heads, heads=heads, ranks=ranks)


@dataclass(frozen=True)
class HeadNorms(Part):
    """A layer norm without bias for each of several heads. `joint`: their weights are one tensor in checkpoints."""

    heads: int
    size: int
    eps: float
    joint: bool

    def weights(self) -> Iterator[Weight]:
        if self.joint:
            yield Weight("weight", (self.heads, self.size))
        else:
            yield from (Weight(f"norms.{head}.weight", (self.size,)) for head in range(self.heads))

    def ops(self, dtype: str) -> Iterator[OpUse]:
        yield torch_op(LAYER_NORM, self.size)


@dataclass(frozen=True)
class Table(Part):
    """Rows that are added by number: of positions, or of kinds of tokens. `first`: the row of the first position."""

    rows: int
    size: int
    first: int = 0

    def weights(self) -> Iterator[Weight]:
        yield Weight("weight", (self.rows, self.size))


@dataclass(frozen=True)
class Embedding(Table):
    """The rows of tokens, of which each rank has a part."""

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("tokens of vocabulary", self.rows, "vocabulary")

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(self, rows=self.rows // ranks)


@dataclass(frozen=True)
class Sinusoids(Part):
    """Sines and cosines of positions, which are added. `first`: the number of the first position."""

    size: int
    first: int


@dataclass(frozen=True)
class Mixer(Part):
    """What mixes the tokens of a layer."""

    @property
    def is_divided(self) -> bool:
        """Whether each of several ranks has a part of its projections, so that its result is a partial sum."""
        return False


@dataclass(frozen=True)
class Attention(Mixer):
    """Grouped-query attention. `qkv`: the projections to queries, keys and values. `rope`: None without a rotation.

    `q_norm`, `k_norm`: of each head, or of all heads together, before the rotation; with `norms_rotated`, after it.
    `unit_norm`: divides rotated queries and keys by their root mean square. `gate`: a projection to a gate for each
    head, or for each element of its result, whose sigmoid multiplies the result; `gated_queries`: each query is
    followed by such a gate of its size. `sinks`: scores that are learned. `temperature`: of queries. `clip`: the
    largest absolute value of queries, keys and values, before the rotation and after norms. `v_norm`: of each value.
    `keys_are_values`: values are keys before norm and rotation. `kept`: higher layers attend with its keys and values.
    The other fields are those of `srv.specs.AttentionLayer`.
    """

    qkv: Linear
    output: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None = None
    q_norm: Norm | HeadNorms | None = None
    k_norm: Norm | HeadNorms | None = None
    unit_norm: Norm | None = None
    gate: Linear | None = None
    sinks: Tensors | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    alibi: tuple[float, ...] | None = None
    bidirectional: bool = False
    gated_queries: bool = False
    temperature: Temperature | None = None
    clip: float | None = None
    norms_rotated: bool = False
    v_norm: Norm | None = None
    keys_are_values: bool = False
    kept: bool = False
    relative_bias: bool = False
    temperature_from: int | None = None

    def layer(self, index: int) -> AttentionLayer:
        """The layer with number `index` as backends receive it."""
        return AttentionLayer(
            index=index,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            chunk=self.chunk,
            sinks=self.sinks is not None,
            alibi=self.alibi,
            bidirectional=self.bidirectional,
            relative_bias=self.relative_bias,
            temperature_from=self.temperature_from,
        )

    def cache(self, dtype: str) -> CacheSpec | None:
        if self.bidirectional:
            return None
        window = self.window or self.chunk
        if window is None:
            return FullAttention((), self.kv_heads, self.head_dim, self.head_dim)
        return SlidingWindow((), self.kv_heads, self.head_dim, self.head_dim, window)

    @property
    def is_divided(self) -> bool:
        return self.qkv.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("attention heads", self.heads)
        yield DividedSize("KV heads", self.kv_heads, copied=True)

    def ops(self, dtype: str) -> Iterator[OpUse]:
        if self.rope is not None:
            yield OpUse(ROTARY, {"head_dim": self.head_dim, "rotary_dim": self.rope.rotary_dim})

    def of_rank(self, ranks: int) -> Self:
        part, heads = super().of_rank(ranks), self.heads // ranks
        alibi = None if self.alibi is None else self.alibi[:heads]
        return dataclasses.replace(part, heads=heads, kv_heads=max(1, self.kv_heads // ranks), alibi=alibi)


@dataclass(frozen=True)
class MLP(Part):
    """down(activation(up(x))), with a gate in `up` if the activation has one. Factors: of the gate, of the result.

    `sparsity`: the share of the gates that are 0, as far as these are normally distributed: the others are what is more
    than the quantile (Gemma 3n).
    """

    up: Linear
    down: Linear
    activation: Activation = "silu_gated"
    gate_factor: float = 1.0
    factor: float = 1.0
    sparsity: float = 0.0

    @property
    def inner(self) -> int:
        """The elements of a token between the projections."""
        return self.down.inputs

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize(INTERMEDIATE, self.inner, "tensor")

    def ops(self, dtype: str) -> Iterator[OpUse]:
        if self.activation == "silu_gated":
            yield OpUse(SILU, {"dim": self.inner})
        elif self.activation == "gelu_tanh_gated":
            yield OpUse(GELU, {"dim": self.inner}, own="torch's operators")
        else:
            yield torch_op(self.activation.removesuffix("_gated"), self.inner)


@dataclass(frozen=True)
class LearnedMLP(MLP):
    """An MLP without a gate whose activation has parameters."""

    learned: Tensors = field(kw_only=True)


@dataclass(frozen=True)
class Experts(Part):
    """The routed experts of a layer, each an MLP, with a gate unless its activation has none.

    `count`: those of this rank, and `elsewhere` those of others. `inner`: the size of one on this rank. `used`: by each
    token.
    """

    count: int
    used: int
    hidden: int
    inner: int
    bias: bool = False
    activation: ExpertActivation = "silu"
    elsewhere: int = 0

    @property
    def total(self) -> int:
        """Those of all ranks, among which tokens choose."""
        return self.count + self.elsewhere

    @property
    def op_sizes(self) -> Mapping[str, int]:
        """Those by which ops of experts are selected."""
        return {"hidden": self.hidden, "intermediate": self.inner, "experts": self.count, "top_k": self.used}

    def weights(self) -> Iterator[Weight]:
        shapes = dict.fromkeys(first_projections(self.activation), (self.inner, self.hidden))
        for expert in range(self.count):
            for name, shape in {**shapes, DOWN: (self.hidden, self.inner)}.items():
                yield Weight(f"{expert}.{name}.weight", shape)
                if self.bias:
                    yield Weight(f"{expert}.{name}.bias", shape[:1])

    @functools.cached_property
    def elements(self) -> int:
        first = len(first_projections(self.activation))
        return self.projected + self.count * (first * self.inner + self.hidden) * self.bias

    @functools.cached_property
    def projected(self) -> int:
        return self.count * (len(first_projections(self.activation)) + 1) * self.inner * self.hidden

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("experts", self.count, "experts")
        yield DividedSize(f"{INTERMEDIATE} of an expert", self.inner, "slices")

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(self, inner=self.inner // ranks)


@dataclass(frozen=True)
class MoE(Part):
    """A mixture of experts. `choice_bias`: is added to scores for the choice. `shared`: an MLP for every token, whose
    result the sigmoid of `shared_gate` multiplies. `to_experts`, `from_experts`: projections to and from the hidden
    size of the experts, where that is not the model's. `scales_inputs`: the weight of an expert multiplies its inputs,
    not its result (Llama 4). With a `logits_soft_cap` c, the router's logits x are c tanh(x / c). `factor`: of the sum
    of routed and shared experts (Grok 2).
    """

    router: Linear
    choice_bias: Tensors | None
    shared: MLP | None
    shared_gate: Linear | None
    experts: Experts
    routing: Routing
    to_experts: Linear | None = None
    from_experts: Linear | None = None
    scales_inputs: bool = False
    logits_soft_cap: float | None = None
    factor: float = 1.0

    def step_bytes(self, item: int) -> int:
        """Bytes of temporary tensors per token, at most; `item`: bytes per element of the model's dtype.

        Each of a token's experts has a row of its gate, of `up`, of what the activation makes of them and of its
        result, which some implementations keep in float32. Beside them are the shared expert, rows of another hidden
        size, and logits, scores and their order.
        """
        used, hidden, inner = self.experts.used, self.experts.hidden, self.experts.inner
        first = len(first_projections(self.experts.activation))
        rows = used * (((first + 1) * inner + hidden) * _FLOAT32 + 2 * hidden * item * self.scales_inputs)
        shared = 0 if self.shared is None else self.shared.inner
        projected = 0 if self.to_experts is None else 2 * hidden + self.router.inputs
        return rows + (3 * shared + projected) * item + 7 * _FLOAT32 * self.experts.total

    def ops(self, dtype: str) -> Iterator[OpUse]:
        if self.routing.scoring == SPARSE_MIXER:
            yield torch_op(SPARSE_MIXER, self.experts.total)
        else:
            yield OpUse(ROUTE, {"experts": self.experts.total, "top_k": self.experts.used})


@dataclass(frozen=True)
class Recurrent(Mixer):
    """A layer that keeps states of a fixed size in place of keys and values (`srv.models.blueprint.recurrent`)."""

    @property
    def convolved(self) -> tuple[int, int] | None:
        """The channels of its convolution over time and the tokens that this reads; None without one."""
        return None

    @property
    def state(self) -> tuple[int, ...] | None:
        """The shape of its state, which is float32; None without one."""
        return None

    def cache(self, dtype: str) -> specs.Recurrent:
        states = [] if self.convolved is None else [StateTensor("conv", self.convolved, dtype)]
        if self.state is not None:
            states.append(StateTensor("state", self.state, WIDE))
        return specs.Recurrent((), tuple(states))


@dataclass(frozen=True)
class Layer(Part):
    """One layer of a decoder: its norms, what mixes tokens, and its feed-forward part, by their names.

    `before`, `between`, `after`: what stands before the mixers, between the two parts, and after them: norms, and the
    mixing of residual streams. With a norm in `after`, of the result of the feed-forward part, the first in `between`
    is that of the result of the mixers. Results are added to the residual in an `order`:
    - "sequence": one after the other.
    - "parallel": together. The two parts read the same, or each a norm of the same.
    - "normed_residual": one after the other, to what the part has read, not to what was there before the norm.
    - "streams": to each of several residual streams, by learned weights.
    - "altup": to one of several residual streams, and by their sum to the others (`srv.models.blueprint.gemma`).
    - "scaled": one after the other, then the layer's own input; a learned number multiplies the residual after that.

    `mixer_factors`, `factors`: of the mixers and of the feed-forward part. `scales`: by which inputs and results of
    each of several mixers are multiplied.
    """

    before: tuple[Part, ...]
    mixers: tuple[Mixer, ...]
    between: tuple[Part, ...]
    feed_forward: MLP | MoE
    after: tuple[Part, ...] = ()
    order: Order = "sequence"
    mixer_factors: Factors = Factors()  # noqa: RUF009 - immutable
    factors: Factors = Factors()  # noqa: RUF009 - immutable
    scales: tuple[tuple[float, float], ...] = ()

    def parts(self) -> Iterator[tuple[str, Part]]:
        for part in (*self.before, *self.mixers, *self.between, self.feed_forward, *self.after):
            yield part.name, part


@dataclass(frozen=True)
class SinglePartLayer(Part):
    """A layer of a decoder that mixes tokens or is a feed-forward part, not both: residual + part(norm(residual))."""

    norm: Norm
    part: Part


@dataclass(frozen=True)
class Stack(Part):
    """The layers of a model, and what is before and behind them."""

    embedding: Embedding
    layers: tuple[Part, ...]


@dataclass(frozen=True)
class DecoderStack(Stack):
    """`before`: what is added to embeddings, and their norm. `after`: the last norm, and what precedes it.

    `factor`: multiplies embeddings, rounded to `factor_dtype` or, if that is "", to the model's; None: not rounded.
    `skips`: those to one layer in their order.
    """

    before: tuple[Part, ...]
    after: tuple[Part, ...]
    factor: float = 1.0
    factor_dtype: str | None = None
    skips: tuple[SkipConnection, ...] = ()

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield self.embedding.name, self.embedding
        yield from ((part.name, part) for part in self.before)
        yield from ((f"layers.{index}", layer) for index, layer in enumerate(self.layers))
        yield from ((part.name, part) for part in self.after)


@dataclass(frozen=True)
class Decoder(Part):
    """A whole model. `output`: None if it generates no text. Logits are divided by `logits_divisor`; with a
    `logits_soft_cap` c, they are c tanh(x / c). `head`: classifies the last token.
    """

    stack: DecoderStack
    output: Output | None
    output_bias: Tensors | None = None
    head: Output | None = None
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None


def torch_op(op: str, dim: int) -> OpUse:
    """An op of `dim` elements for which layers call torch's own operator on every platform."""
    return OpUse(op, {"dim": dim}, own=TORCH, always_own=True)


def alike(kinds: Iterable[Kind], make: Callable[[Kind], Made]) -> tuple[Made, ...]:
    """`make(kind)` for each kind; those of equal kinds are one object."""
    made: list[tuple[Kind, Made]] = []
    result: list[Made] = []
    for kind in kinds:
        found = next((part for other, part in made if other is kind or other == kind), None)
        if found is None:
            found = make(kind)
            made.append((kind, found))
        result.append(found)
    return tuple(result)


def walk(part: Part, prefix: str = "") -> Iterable[tuple[str, Part]]:
    """The part and everything within it, from the outside in, each with its whole name. `prefix`: that of the part."""
    return part.within if not prefix else _renamed(part.within, prefix)


def _renamed(named: Iterable[tuple[str, Part]], prefix: str) -> Iterator[tuple[str, Part]]:
    return ((below(prefix, name), part) for name, part in named)


def below(prefix: str, name: str) -> str:
    """The name of what is called `name` within `prefix`; either may be ""."""
    return f"{prefix}.{name}" if prefix and name else prefix or name

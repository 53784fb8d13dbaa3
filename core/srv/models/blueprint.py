"""What a model is made of: a tree of named parts. Torch-free.

A family makes the tree from the fields of its configuration, once. Everything else that is known of a model before it
is built is a walk over the tree (`srv.models.derive`): parameters, matrices, attention, the ops that layers call. The
layers are a map over it: one class in torch for each kind of part. Must not know any family, nor how weights are
stored.

    Encoder ─┬─ Embedding  model.embed_tokens
             ├─ Norm       model.embed_norm
             ├─ layers[i] ─┬─ Attention  model.layers.i.self_attn ─┬─ Linear  q_proj, k_proj, v_proj
             │             │                                       └─ Linear  o_proj
             │             ├─ MLP        model.layers.i.mlp ─ ...
             │             └─ Norm ...
             └─ Head       head.dense, score

Names are those that layers have for the weights; what checkpoints call them is a family's table of names. Parts do not
know their layer's number, so that layers which are alike are one object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from srv.models.layers.rope_config import RopeConfig
from srv.specs import AttentionLayer

Kind = TypeVar("Kind")
Made = TypeVar("Made")

NORM, LAYER_NORM, ROTARY = "rms_norm", "layer_norm", "rotary"
SILU, GELU = "silu_and_mul", "gelu"
TORCH = "torch's operator"

# "silu_gated" and "gelu_gated": the product of an activation of one half, the gate, and the other one.
Activation: TypeAlias = Literal["silu_gated", "gelu_gated", "gelu", "gelu_tanh", "relu", "tanh"]
GATED: Mapping[Activation, str] = MappingProxyType({"silu_gated": SILU, "gelu_gated": GELU})  # and the op of each


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

    def ops(self) -> Iterator[OpUse]:
        """What the layer of this part calls itself, beside the products with matrices."""
        return iter(())


@dataclass(frozen=True)
class Linear(Part):
    """y = x Wᵀ + b, of one or more linear layers of a checkpoint. `outputs`: of each, by its name."""

    outputs: Mapping[str, int]
    inputs: int
    bias: bool = False

    def weights(self) -> Iterator[Weight]:
        for name, size in self.outputs.items():
            yield Weight(f"{name}.weight", (size, self.inputs))
            if self.bias:
                yield Weight(f"{name}.bias", (size,))


@dataclass(frozen=True)
class Output(Linear):
    """A linear layer behind the last one of the model: of a head, or to the vocabulary."""


@dataclass(frozen=True)
class Norm(Part):
    """An RMS norm, or a layer norm, which may have a bias."""

    size: int
    eps: float
    rms: bool = False
    bias: bool = False

    def weights(self) -> Iterator[Weight]:
        yield Weight("weight", (self.size,))
        if self.bias:
            yield Weight("bias", (self.size,))

    def ops(self) -> Iterator[OpUse]:
        yield OpUse(NORM, {"dim": self.size}) if self.rms else torch_op(LAYER_NORM, self.size)


@dataclass(frozen=True)
class Table(Part):
    """Rows that are added by number: of positions, or of kinds of tokens."""

    rows: int
    size: int

    def weights(self) -> Iterator[Weight]:
        yield Weight("weight", (self.rows, self.size))


@dataclass(frozen=True)
class Embedding(Table):
    """The rows of tokens, which a checkpoint may quantize."""


@dataclass(frozen=True)
class Attention(Part):
    """Grouped-query attention. `qkv`: the projections to queries, keys and values. `rope`: None without a rotation.

    `window`, `scale`, `bidirectional`: as in `srv.specs.AttentionLayer`.
    """

    qkv: Linear
    output: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    bidirectional: bool = False
    rope: RopeConfig | None = None

    def layer(self, index: int) -> AttentionLayer:
        """What a backend is told of it in layer `index`."""
        return AttentionLayer(
            index,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.scale,
            window=self.window,
            bidirectional=self.bidirectional,
        )

    def ops(self) -> Iterator[OpUse]:
        if self.rope is not None:
            yield OpUse(ROTARY, {"head_dim": self.head_dim, "rotary_dim": self.rope.rotary_dim})


@dataclass(frozen=True)
class MLP(Part):
    """down(activation(up(x))). `up`: with the gate before it, if the activation has one."""

    up: Linear
    down: Linear
    activation: Activation

    @property
    def inner(self) -> int:
        """The elements of a token between the projections."""
        return self.down.inputs

    def ops(self) -> Iterator[OpUse]:
        if self.activation == "silu_gated":
            yield OpUse(SILU, {"dim": self.inner})
        else:
            yield torch_op(GATED.get(self.activation, self.activation), self.inner)


@dataclass(frozen=True)
class Stack(Part):
    """The layers of a model, and what is before and behind them."""

    embedding: Embedding
    layers: tuple[Part, ...]


def torch_op(op: str, dim: int) -> OpUse:
    """An op of `dim` elements for which layers call torch's own operator on every platform."""
    return OpUse(op, {"dim": dim}, own=TORCH, always_own=True)


def alike(kinds: Iterable[Kind], make: Callable[[Kind], Made]) -> tuple[Made, ...]:
    """`make(kind)` for each kind; those of equal kinds are one object."""
    made: list[tuple[Kind, Made]] = []
    for kind in kinds:
        found = next((part for other, part in made if other == kind), None)
        made.append((kind, make(kind) if found is None else found))
    return tuple(part for _, part in made)


def walk(part: Part, prefix: str = "") -> Iterator[tuple[str, Part]]:
    """The part and everything within it, from the outside in, each with its whole name. `prefix`: that of the part."""
    yield prefix, part
    for name, each in part.parts():
        yield from walk(each, below(prefix, name))


def below(prefix: str, name: str) -> str:
    """The name of what is called `name` within `prefix`; either may be ""."""
    return f"{prefix}.{name}" if prefix and name else prefix or name

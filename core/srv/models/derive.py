"""What follows from the blueprint of a model, before it is built: each is one walk over the tree. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from srv import specs
from srv.dist.mesh import Axis, Mesh
from srv.models.blueprint import (
    MLP,
    Attention,
    DividedSize,
    Embedding,
    Experts,
    Linear,
    Mixer,
    OpUse,
    Output,
    Part,
    Stack,
    alike,
    below,
    walk,
)
from srv.models.blueprint.gemma import ReadingAttention
from srv.models.blueprint.latent import Latent
from srv.models.layers.moe_config import ExpertActivation
from srv.specs import AttentionLayer, CacheSpec, FullAttention, SlidingWindow

Kind = TypeVar("Kind", bound=Part)
OUTPUT = "lm_head"  # the name of the output layer
# Along which axis of a mesh a part is divided; any other one as what it is in.
_AXES: tuple[tuple[type[Part], Axis], ...] = (
    (Mixer, "heads"),
    (MLP, "tensor"),
    (Embedding, "embedding"),
    (Output, "vocabulary"),
)


class LayerMatrix(NamedTuple):
    """A weight matrix of one layer. `names`: the layers of the checkpoint that it fuses. `embedding`: its rows are
    looked up. `tied`: the output layer, with the matrix of the embedding. `role`: as `OpLayer.role`. `bias`: whether
    the layer adds one. `parts`: the outputs of each of `names`; () if they are equal."""

    names: tuple[str, ...]
    inputs: int
    outputs: int
    embedding: bool = False
    tied: bool = False
    role: str = ""
    bias: bool = False
    parts: tuple[int, ...] = ()

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """The outputs of each of `names`."""
        return self.parts or (self.outputs // len(self.names),) * len(self.names)


class ExpertMatrices(NamedTuple):
    """The experts of one layer. `prefix`: of the names of all. `sizes`: by which ops of experts are selected.

    `bias`: whether their projections have biases.
    """

    prefix: str
    sizes: Mapping[str, int]
    activation: ExpertActivation
    bias: bool = False


class ModelOps(NamedTuple):
    """Everything that a model's layers call, each distinct use of an op once; the matrices of all layers."""

    ops: tuple[OpUse, ...]
    matrices: tuple[LayerMatrix, ...]
    experts: tuple[ExpertMatrices, ...] = ()


def of_rank(part: Kind, mesh: Mesh, axis: Axis = "tensor") -> Kind:
    """What the first rank of a mesh has of a part. `axis`: of what the part is in."""
    if isinstance(part, Experts):
        count = part.count // mesh.experts
        return dataclasses.replace(part.of_rank(mesh.width("slices")), count=count, elsewhere=part.count - count)
    own = next((own for kind, own in _AXES if isinstance(part, kind)), None)
    if isinstance(part, Output) and part.tied:
        own = "embedding"
    inner = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    parts = {name: value for name, value in inner.items() if isinstance(value, Part)}
    rows = {name: value for name, value in inner.items() if isinstance(value, tuple) and _are_parts(value)}
    if own is not None or not (parts or rows):
        return part.of_rank(mesh.width(own or axis))
    changes: dict[str, Any] = {name: of_rank(value, mesh, axis) for name, value in parts.items()}
    changes |= {name: alike(value, lambda each: of_rank(each, mesh, axis)) for name, value in rows.items()}
    return dataclasses.replace(part, **changes)


def _are_parts(values: tuple[Any, ...]) -> bool:
    return bool(values) and isinstance(values[0], Part)


def parameters(tree: Part) -> int:
    """How many there are; tied embeddings count once."""
    return sum(part.elements for _, part in walk(tree))


def active_parameters(tree: Part) -> int:
    """Those that take part in computing one token: of each layer's experts, the chosen ones."""
    return sum(_active(part) for _, part in walk(tree))


def _active(part: Part) -> int:
    return part.elements // part.count * min(part.used, part.count) if isinstance(part, Experts) else part.elements


def projection_parameters(tree: Part) -> int:
    """The weights of linear layers, without the embeddings, the output layer, heads and routers, and without biases."""
    return sum(part.projected for _, part in walk(tree))


def attention_layers(tree: Part) -> tuple[AttentionLayer, ...]:
    """The attention of each layer that has one, with the number of the layer; those that read the cache of another
    layer have its attention.
    """
    numbered = ((index, part) for index, layer in enumerate(stack(tree).layers) for _, part in walk(layer))
    attending = ((index, part) for index, part in numbered if isinstance(part, Attention | Latent))
    return tuple(part.layer(index) for index, part in attending if not isinstance(part, ReadingAttention))


def head_sizes(tree: Part) -> dict[str, int]:
    """Heads, KV heads and the size of a head of the first attention layer, by the names of `ModelFacts`; {} of none."""
    first = next(iter(attention_layers(tree)), None)
    return {} if first is None else {"heads": first.heads, "kv_heads": first.kv_heads, "head_dim": first.head_dim}


def divided(tree: Part) -> tuple[DividedSize, ...] | None:
    """The sizes that are divided among ranks, those of layers first; None if the layers cannot be sharded."""
    parts = distinct(tree)
    mixers = [part for part in parts if isinstance(part, Mixer)]
    if not mixers or not all(part.is_divided for part in mixers):
        return None
    sizes = [size for part in parts if not isinstance(part, Embedding) for size in part.divided_sizes()]
    rows = [size for part in parts if isinstance(part, Embedding) for size in part.divided_sizes()]
    return tuple(dict.fromkeys((*sizes, *rows)))


def ops(tree: Part, dtype: str) -> tuple[OpUse, ...]:
    """What layers call beside the products with matrices, each distinct use once. `dtype`: of the model."""
    used = (use for part in distinct(tree) for use in part.ops(dtype))
    return tuple({(use.op, use.dtype, tuple(use.sizes.items())): use for use in used}.values())


def matrices(tree: Part) -> Iterator[LayerMatrix]:
    """All of them but those of experts, by the names that layers have for them; that of the embedding first."""
    for name, part in walk(tree):
        if isinstance(part, Embedding):
            yield LayerMatrix((name,), part.size, part.rows, embedding=True)
        elif isinstance(part, Linear):
            names, outputs = tuple(below(name, each) for each in part.outputs), tuple(part.outputs.values())
            parts = outputs if len(outputs) > 1 else ()
            tied = isinstance(part, Output) and part.tied
            yield LayerMatrix(names, part.inputs, sum(outputs), tied=tied, role=part.role, bias=part.bias, parts=parts)


def model_ops(tree: Part, dtype: str) -> ModelOps:
    """Everything that the layers of a model call. `dtype`: of the model."""
    experts = ((name, part) for name, part in walk(tree) if isinstance(part, Experts))
    of_experts = tuple(ExpertMatrices(name, part.op_sizes, part.activation, part.bias) for name, part in experts)
    return ModelOps(ops(tree, dtype), tuple(matrices(tree)), of_experts)


def distinct(tree: Part) -> tuple[Part, ...]:
    """All parts, those of layers that are alike once."""
    return tuple({id(part): part for _, part in walk(tree)}.values())


def find(tree: Part, kind: type[Kind]) -> Kind | None:
    """The first part of a kind; None without any."""
    return next((part for part in distinct(tree) if isinstance(part, kind)), None)


def stack(tree: Part) -> Stack:
    """The layers of a model."""
    return next(part for _, part in walk(tree) if isinstance(part, Stack))


def cache_groups(tree: Part, context_length: int, dtype: str) -> tuple[CacheSpec, ...]:
    """What the layers of a model keep (`grouped`). `dtype`: of the model.

    An encoder has one group without layers, which takes no bytes: its pages hold nothing. Each covers the whole
    context, so that a request takes one, as it takes a slot.
    """
    layers = attention_layers(tree)
    if layers and all(layer.bidirectional for layer in layers):
        return (FullAttention((), layers[0].kv_heads, layers[0].head_dim, layers[0].head_dim),)
    numbered = ((index, part.cache(dtype)) for index, layer in enumerate(stack(tree).layers) for _, part in walk(layer))
    return grouped([of_layer(cache, index) for index, cache in numbered if cache is not None], context_length)


def of_layer(cache: CacheSpec, index: int) -> CacheSpec:
    """That of layer `index`."""
    if isinstance(cache, specs.Latent) and cache.indexed:
        return msgspec.structs.replace(cache, layers=(index,), indexed=(index,))
    return msgspec.structs.replace(cache, layers=(index,))


def grouped(caches: Sequence[CacheSpec], context_length: int) -> tuple[CacheSpec, ...]:
    """The cache groups of a model: full attention first, then windows, the shortest first, latents and states.

    Layers with equal sizes are a group, with or without an indexer. A window that is not shorter than the context frees
    nothing.
    """
    layers: dict[CacheSpec, list[int]] = {}
    indexed = sorted(layer for cache in caches if isinstance(cache, specs.Latent) for layer in cache.indexed)
    for cache in caches:
        if isinstance(cache, SlidingWindow) and cache.window >= context_length:
            cache = FullAttention(cache.layers, cache.kv_heads, cache.key_dim, cache.value_dim)
        alike = msgspec.structs.replace(cache, layers=())
        if isinstance(alike, specs.Latent):
            alike = msgspec.structs.replace(alike, indexed=())
        layers.setdefault(alike, []).extend(cache.layers)
    groups = [_group(alike, found, indexed) for alike, found in layers.items()]
    return tuple(sorted(groups, key=_order))


def _group(cache: CacheSpec, layers: list[int], indexed: list[int]) -> CacheSpec:
    if isinstance(cache, specs.Latent):
        own = tuple(layer for layer in indexed if layer in layers)
        cache = msgspec.structs.replace(cache, indexed=own)
    return msgspec.structs.replace(cache, layers=tuple(sorted(layers)))


def _order(group: CacheSpec) -> tuple[int, int]:
    kinds = (FullAttention, SlidingWindow)
    number = next((number for number, kind in enumerate(kinds) if isinstance(group, kind)), len(kinds))
    return number + isinstance(group, specs.Recurrent), getattr(group, "window", None) or 0

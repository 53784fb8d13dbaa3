"""How native models are sharded over ranks: which numbers of ranks a model allows, and the facts of one rank's part.

Torch-free: `srv plan` and a launch ask the same questions. `srv.models.layers.factory` divides the matrices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, assert_never

import msgspec

from srv.dist.group import is_divisible
from srv.dist.mesh import Axis, Mesh
from srv.errors import ModelError
from srv.kept import kept_per_object
from srv.models import blueprint, derive
from srv.models.blueprint import DividedSize, Experts, Linear, Output, Part, below, walk
from srv.models.checkpoints.slices import Section, Sections
from srv.models.facts.weight_rules import layer_schemes
from srv.models.families.trees import native_tree, native_tree_of_model
from srv.models.layers.moe_config import expert_names
from srv.quantization import registry as quantization
from srv.quantization.method import QuantMethod
from srv.quantization.schemes import Scheme, Units
from srv.specs import CacheSpec, FullAttention, Latent, ModelFacts, Recurrent, SlidingWindow

MAX_LISTED_RANKS = 64  # legal sizes are listed up to this one


class BlockBorders(NamedTuple):
    """Outputs ("rows") or inputs ("columns") of a quantized layer, which are divided at multiples of `block`.

    `size`: how many there are. `unit`: those of one head, of which ranks have copies if they are more than heads.
    `along`: the axis of a mesh whose ranks divide them.
    """

    layer: str
    axis: str
    size: int
    unit: int
    block: int
    along: Axis = "tensor"

    def obstacle(self, mesh: Mesh) -> str | None:
        """The clause that says why a rank's part does not end at a border."""
        ranks = mesh.width(self.along)
        part = self.size // ranks if self.size // self.unit >= ranks else self.unit
        if part % self.block == 0:
            return None
        return f"a rank's {part} {self.axis} of {self.layer} are not whole quantization blocks of {self.block}"


class Divisions(NamedTuple):
    """The sizes of a model that are divided among ranks, and the `borders` of layers that are quantized in blocks."""

    sizes: tuple[DividedSize, ...]
    borders: tuple[BlockBorders, ...] = ()

    def obstacles(self, mesh: Mesh) -> list[str]:
        """Clauses that say which sizes cannot be divided among the ranks of a mesh; [] if all can."""
        clauses = [
            f"its {size} {name} are not a multiple of {mesh.width(along)}"
            for name, size, along, copied in self.sizes
            if not copied and size % mesh.width(along)
        ]
        clauses += [
            f"its {size} {name} can neither be divided among {mesh.width(along)} ranks nor copied evenly"
            for name, size, along, copied in self.sizes
            if copied and not is_divisible(size, mesh.width(along))
        ]
        if clauses:
            return clauses
        return list(dict.fromkeys(clause for each in self.borders if (clause := each.obstacle(mesh)) is not None))

    def legal_ranks(self) -> tuple[int, ...]:
        """All numbers of ranks, up to MAX_LISTED_RANKS, that divide everything."""
        return _legal_ranks(self)


@functools.lru_cache(maxsize=64)  # the support matrix asks about few models, many times
def _legal_ranks(sizes: Divisions) -> tuple[int, ...]:
    return tuple(ranks for ranks in range(1, MAX_LISTED_RANKS + 1) if not sizes.obstacles(Mesh(ranks)))


@kept_per_object
def divisions(model: ModelFacts, *, in_blocks: bool) -> Divisions | str:
    """The divided sizes of a model, or the clause that says why it cannot be sharded at all.

    `in_blocks`: quantized weights stay so.
    """
    method = quantization.method_of(model)
    if method is not None and method.sharding is not None:
        return method.sharding
    if method is None and (stored := model.quantization or ("int8" if model.stored_types.get("int8") else None)):
        return f"weights quantized with {stored} cannot be sharded yet"
    tree = native_tree_of_model(model)
    if isinstance(tree, str):
        return f"only models with native layers can be sharded ({tree})"
    sizes = derive.divided(tree)
    if sizes is None:
        return f"the layers of {model.architecture} cannot be sharded"
    borders = _borders(model, tree, method, in_blocks)
    return borders if isinstance(borders, str) else Divisions(sizes, borders)


def _borders(
    model: ModelFacts, tree: Part, method: QuantMethod | None, in_blocks: bool
) -> tuple[BlockBorders, ...] | str:
    """Those of layers that hold blocks; a clause if layers that are quantized so cannot be sharded."""
    if not in_blocks:
        return ()
    if model.column_block > 1:
        columns = Units(inputs=model.column_block)
        return tuple(dict.fromkeys(_of_layers(tree, lambda names, inputs, experts: columns)))
    if method is None or model.format == "gguf":
        return ()
    try:
        schemes = layer_schemes(model, method)

        def units(names: tuple[str, ...], inputs: int, experts: bool) -> Units:
            return _units(schemes(names, inputs, False), experts)

        return tuple(dict.fromkeys(_of_layers(tree, units)))
    except _NotDivided as refused:
        return str(refused)
    except ModelError:
        return ()  # a launch refuses damaged files with their own reason


class _NotDivided(Exception):
    """A layer is quantized so that it cannot be divided. The message is a clause."""


def _of_layers(tree: Part, units_of: Callable[[tuple[str, ...], int, bool], Units]) -> Iterator[BlockBorders]:
    """`units_of(names, inputs, experts)`: of the matrix of layers, or of experts. Raises what it raises."""
    for name, part in walk(tree):
        if isinstance(part, Linear) and part.split in ("in", "out") and not (isinstance(part, Output) and part.tied):
            names = tuple(below(name, each) for each in part.outputs)
            units = units_of(names, part.inputs, False)
            if part.split == "in":
                yield from _of_sections(names[0], "columns", part.all_sections[0], units.inputs)
            else:
                for each, sections in zip(names, part.all_sections, strict=True):
                    yield from _of_sections(each, "rows", sections, units.outputs)
        elif isinstance(part, Experts):
            gate_up, down = expert_names(name, part.count, part.activation)
            inner = (Section(part.inner),)
            yield from _of_sections(gate_up[0], "rows", inner, units_of(gate_up, part.hidden, True).outputs, "slices")
            yield from _of_sections(down[0], "columns", inner, units_of(down, part.inner, True).inputs, "slices")


def _of_sections(
    layer: str, axis: str, sections: Sections, block: int, along: Axis = "tensor"
) -> Iterator[BlockBorders]:
    return (BlockBorders(_last(layer), axis, size, unit, block, along) for size, unit in sections)


def _units(scheme: Scheme | None, experts: bool) -> Units:
    units = Units() if scheme is None else scheme.expert_units if experts else scheme.units
    if isinstance(units, str):
        raise _NotDivided(units)
    return units


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def rank_facts(model: ModelFacts, ranks: int) -> ModelFacts:
    """The facts as one of `ranks` ranks sees them, among which heads are divided: its share of heads, KV heads and
    states.
    """
    if ranks == 1:
        return model
    return dataclasses.replace(
        model,
        heads=model.heads // ranks,
        kv_heads=max(1, model.kv_heads // ranks),
        cache_groups=tuple(_of_rank(model, group, ranks) for group in model.cache_groups),
    )


def _of_rank(model: ModelFacts, group: CacheSpec, ranks: int) -> CacheSpec:
    """A cache group as one of several ranks stores it."""
    match group:
        case FullAttention() | SlidingWindow():
            return msgspec.structs.replace(group, kv_heads=max(1, group.kv_heads // ranks))
        case Latent():
            return group  # all heads share the latents, so every rank stores them
        case Recurrent():
            return _states_of_rank(model, group, ranks)
        case _ as never:
            assert_never(never)


def _states_of_rank(model: ModelFacts, group: Recurrent, ranks: int) -> Recurrent:
    """Those of the whole model if its layers are not native, which no ranks divide."""
    tree = native_tree_of_model(model)
    if isinstance(tree, str):
        return group
    layer = derive.stack(tree).layers[group.layers[0]]
    (mixer,) = (part for _, part in walk(layer) if isinstance(part, blueprint.Recurrent))
    part = mixer.of_rank(ranks).cache(model.dtype)
    shapes = {state.name: state.shape for state in part.states}
    states = tuple(msgspec.structs.replace(state, shape=shapes[state.name]) for state in group.states)
    return msgspec.structs.replace(group, states=states)


def rank_share(model: ModelFacts, mesh: Mesh) -> float:
    """The share of the parameters that one rank holds; norms and few KV heads are on every rank."""
    if mesh.tensor == 1:
        return 1.0
    tree = native_tree(model.architecture, model.config)
    return derive.parameters(derive.of_rank(tree, mesh)) / derive.parameters(tree)

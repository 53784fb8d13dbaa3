"""How native models are sharded over ranks: which numbers of ranks a model allows, and the facts of one rank's part.

Torch-free: `srv plan` and a launch ask the same questions. `srv.models.layers.factory` divides the matrices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple, assert_never

import msgspec

from srv.dist.group import is_divisible
from srv.dist.mesh import Axis, Mesh
from srv.errors import ModelError
from srv.kept import kept_per_object
from srv.models import derive
from srv.models.blueprint import Experts, Linear, Output, Part, below, walk
from srv.models.facts.weight_rules import NOT_IN_ORDER, layer_schemes, sized_rules
from srv.models.families.trees import native_tree, native_tree_of_model
from srv.models.layers.moe_config import expert_names
from srv.quantization import registry as quantization
from srv.quantization.method import QuantMethod
from srv.quantization.schemes import LayerSchemes, Scheme, Units
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

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    other_kv_heads: tuple[int, ...] = ()
    expert_inner: int = 0
    experts: int = 0
    borders: tuple[BlockBorders, ...] = ()

    def obstacles(self, mesh: Mesh) -> list[str]:
        """Clauses that say which sizes cannot be divided among the ranks of a mesh; [] if all can."""
        divided: tuple[tuple[str, int, Axis], ...] = (
            ("attention heads", self.heads, "heads"),
            ("units of intermediate size", self.intermediate, "dense"),
            ("tokens of vocabulary", self.vocab, "vocabulary"),
            ("experts", self.experts, "experts"),
            ("units of intermediate size of an expert", self.expert_inner, "slices"),
        )
        clauses = [
            f"its {size} {name} are not a multiple of {mesh.width(axis)}"
            for name, size, axis in divided
            if size % mesh.width(axis)
        ]
        ranks = mesh.width("heads")
        clauses += [
            f"its {heads} KV heads can neither be divided among {ranks} ranks nor copied evenly"
            for heads in (self.kv_heads, *self.other_kv_heads)
            if not is_divisible(heads, ranks)
        ]
        if clauses:
            return clauses
        return list(dict.fromkeys(clause for each in self.borders if (clause := each.obstacle(mesh)) is not None))

    def legal_ranks(self) -> tuple[int, ...]:
        """All numbers of ranks, up to MAX_LISTED_RANKS, that divide everything."""
        return _legal_ranks(self)


@functools.lru_cache(maxsize=64)  # the support matrix asks about few models, many times
def _legal_ranks(sizes: Divisions) -> tuple[int, ...]:
    return tuple(
        ranks for ranks in range(1, min(sizes.heads, MAX_LISTED_RANKS) + 1) if not sizes.obstacles(Mesh(ranks))
    )


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
    if any(isinstance(group, Recurrent) for group in model.cache_groups):
        return "recurrent states cannot be sharded yet"
    tree = native_tree_of_model(model)
    if isinstance(tree, str):
        return f"only models with native layers can be sharded ({tree})"
    sizes = derive.divided(tree)
    if sizes is None:
        return f"the layers of {model.architecture} cannot be sharded"
    borders = _borders(model, tree, sizes, method, in_blocks)
    return borders if isinstance(borders, str) else Divisions(*sizes, borders=borders)


def _borders(
    model: ModelFacts, tree: Part, sizes: derive.DividedSizes, method: QuantMethod | None, in_blocks: bool
) -> tuple[BlockBorders, ...] | str:
    """Those of layers that hold blocks; a clause if layers that are quantized so cannot be sharded."""
    if not in_blocks:
        return ()
    if model.column_block > 1:
        columns = (("o_proj", sizes.heads * sizes.head_dim), ("down_proj", sizes.intermediate))
        return tuple(BlockBorders(name, "columns", size, 1, model.column_block) for name, size in columns)
    if method is None or model.format == "gguf":
        return ()
    if not method.online and sized_rules(model, tree) is not None:
        return NOT_IN_ORDER
    try:
        schemes = layer_schemes(model, method)
        divided = tuple(_of_layers(tree, schemes))
    except ModelError:
        return ()  # a launch refuses damaged files with their own reason
    clause = next((each for each in divided if isinstance(each, str)), None)
    return clause or tuple(dict.fromkeys(each for each in divided if isinstance(each, BlockBorders)))


def _of_layers(tree: Part, schemes: LayerSchemes) -> Iterator[BlockBorders | str]:
    for name, part in walk(tree):
        if isinstance(part, Linear) and part.split is not None and not (isinstance(part, Output) and part.tied):
            names = tuple(below(name, each) for each in part.outputs)
            units = _units(schemes(names, part.inputs, False))
            if isinstance(units, str):
                yield units
            elif part.split == "in":
                yield BlockBorders(_last(names[0]), "columns", part.inputs, 1, units.inputs)
            else:
                sizes = zip(names, part.outputs.values(), strict=True)
                yield from (BlockBorders(_last(each), "rows", size, part.unit, units.outputs) for each, size in sizes)
        elif isinstance(part, Experts):
            gate_up, down = expert_names(name, part.count, part.activation)
            for names, inputs, axis in ((gate_up, part.hidden, "rows"), (down, part.inner, "columns")):
                units = _units(schemes(names, inputs, False))
                if isinstance(units, str):
                    yield units
                else:
                    block = units.outputs if axis == "rows" else units.inputs
                    yield BlockBorders(_last(names[0]), axis, part.inner, 1, block, "slices")


def _units(scheme: Scheme | None) -> Units | str:
    return Units() if scheme is None else scheme.units


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def rank_facts(model: ModelFacts, ranks: int) -> ModelFacts:
    """The facts as one of `ranks` ranks sees them, among which heads are divided: its share of heads and KV heads."""
    if ranks == 1:
        return model
    return dataclasses.replace(
        model,
        heads=model.heads // ranks,
        kv_heads=max(1, model.kv_heads // ranks),
        cache_groups=tuple(_of_rank(group, ranks) for group in model.cache_groups),
    )


def _of_rank(group: CacheSpec, ranks: int) -> CacheSpec:
    """A cache group as one of several ranks stores it."""
    match group:
        case FullAttention() | SlidingWindow():
            return msgspec.structs.replace(group, kv_heads=max(1, group.kv_heads // ranks))
        case Latent():
            return group  # all heads share the latents, so every rank stores them
        case Recurrent():
            return group  # `divisions` refuses such models
        case _ as never:
            assert_never(never)


def rank_share(model: ModelFacts, mesh: Mesh) -> float:
    """The share of the parameters that one rank holds; norms and few KV heads are on every rank."""
    if mesh.tensor == 1:
        return 1.0
    tree = native_tree(model.architecture, model.config)
    return derive.parameters(derive.of_rank(tree, mesh)) / derive.parameters(tree)

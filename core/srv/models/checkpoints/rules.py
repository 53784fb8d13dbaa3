"""What a checkpoint stores otherwise than the layers hold it, as data: rules that rename, split, transpose or permute.

    tensor of the checkpoint ── rename ── transpose ── scale and permute the rows ── split ──► tensors of the layers

An architecture lists its rules; most need only a `Rename`. Loaders apply them, and plans read them backwards, from the
names of layers to those of the checkpoint (`WeightMapping`). Torch-free. Must not know the sizes of a model
(`srv.models.checkpoints.row_orders`), tensors (`srv.models.checkpoints.rule_storage`) or quantization.

Names of matrices in rules are the last parts of names of layers ("self_attn.qkv_proj").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")

ExpertColumns: TypeAlias = Literal["", "halves", "pairs", "either", "rows"]

_NUMBER = re.compile(r"\.(\d+)\.")
_NONE: Mapping[str, str] = MappingProxyType({})


class Rename(NamedTuple):
    """Other names.

    `names`: from the names of modules, or of single tensors, in checkpoints to those in the layers; the first "*"
    stands for the number of a layer. `prefix`: the beginning of all of these but that of the output layer, which some
    checkpoints leave out. `parts`: from the parts of names between dots to those of the layers, wherever they stand, or
    in names that have the part `within`.
    `suffixes`: old names of the last part of a renamed tensor ("gamma"), with those of today.
    """

    names: Mapping[str, str] = _NONE
    prefix: str = ""
    parts: Mapping[str, str] = _NONE
    within: str = ""
    suffixes: Mapping[str, str] = _NONE


class Skip(NamedTuple):
    """Tensors that no layer needs, by their whole names in checkpoints; "*" stands for the number of a layer."""

    tensors: tuple[str, ...]


class Split(NamedTuple):
    """A fused matrix, which is divided into layers beside it, in their order.

    `parts`: `QKV`, with the rows of attention, or others of equal size (`GATE_UP`). Quantized matrices stay fused.
    """

    matrix: str
    parts: tuple[str, ...]


class Transpose(NamedTuple):
    """Matrices whose weights are stored as [in, out]."""

    matrices: tuple[str, ...]


class Permute(NamedTuple):
    """A fused matrix with its rows in another order, which is that of its `Split` once they are permuted.

    "kv_heads": for each KV head, its queries, its key and its value. "swapped_halves": the second half comes first.
    """

    matrix: str
    rows: Literal["kv_heads", "swapped_halves"]


class PermuteRotary(NamedTuple):
    """Queries and keys whose rotary pairs are adjacent (GPT-J); those of the layers are half the dimensions apart.

    `dims`: the function from the fields of the configuration to the number of these dimensions per head; None: all.
    `indexer`: the pairs of the indexer of sparse attention are adjacent as well. `gated_queries`: each query is
    followed by a gate of the size of a value in the projection of both.
    """

    dims: Callable[[Mapping[str, Any]], int] | None = None
    indexer: bool = False
    gated_queries: bool = False


class StackedExperts(NamedTuple):
    """Experts of a layer in two tensors with inputs as rows, and their biases likewise.

    "experts.gate_up_proj" [E, in, 2 out] and "experts.down_proj" [E, in, out]. `columns`: those of the gate come before
    those of the up projection ("halves"), or they take turns ("pairs"). Stacks with outputs as rows need no rule.
    "either": some checkpoints have "halves", others outputs as rows; sizes tell which.

    "rows": the experts are in three matrices, the rows of one after those of another. Rows of "experts.gate_proj" and
    "experts.up_proj" are outputs, and those of "experts.down_proj" inputs.
    """

    columns: Literal["halves", "pairs", "either", "rows"]


class UnitRows(NamedTuple):
    """A matrix whose rows the layers hold divided by their Euclidean norms (the NormHead of Baichuan 2).

    `matrix`: its whole name in the layers. `applies`: from the fields of the configuration to whether they do.
    """

    matrix: str
    applies: Callable[[Mapping[str, Any]], bool]


Rule: TypeAlias = Rename | Skip | Split | Transpose | Permute | PermuteRotary | StackedExperts | UnitRows
RULES = (Rename, Skip, Split, Transpose, Permute, PermuteRotary, StackedExperts, UnitRows)
_Kind = TypeVar("_Kind", bound=Rule)


class WeightMapping:
    """The rules of one architecture as questions about names. Without rules, names and matrices are the same."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = rules
        self._renames, self._splits = self._of(Rename), self._of(Split)
        self._skipped = frozenset(name for rule in self._of(Skip) for name in rule.tensors)
        self._parts = [(rule.within, rule.parts) for rule in self._renames if rule.parts]
        self.transposed = tuple(matrix for rule in self._of(Transpose) for matrix in rule.matrices)
        self.permuted = {rule.matrix: rule.rows for rule in self._of(Permute)}
        self.rotary = next(iter(self._of(PermuteRotary)), None)
        self.unit_rows = self._of(UnitRows)
        self.expert_columns: ExpertColumns = next((rule.columns for rule in self._of(StackedExperts)), "")

    def _of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        return tuple(rule for rule in self._rules if isinstance(rule, kind))

    @property
    def only_renames(self) -> bool:
        """Whether all matrices are stored as the layers hold them."""
        return all(isinstance(rule, Rename | Skip) for rule in self._rules)

    def is_transposed(self, name: str) -> bool:
        return any(name.endswith(f".{matrix}.weight") for matrix in self.transposed)

    def layer_name(self, stored: str) -> str | None:
        """The name of a checkpoint's tensor in the model; None if no layer needs it."""
        if _NUMBER.sub(".*.", stored, count=1) in self._skipped:
            return None
        for within, names in self._parts:
            stored = _with_parts(stored, within, names)
        for rule in self._renames:
            bare = stored.removeprefix(rule.prefix)
            (module, suffix), number = _divided(bare), _NUMBER.search(bare)
            whole = rule.names.get(_NUMBER.sub(".*.", bare, count=1))
            name = whole or rule.names.get(_NUMBER.sub(".*.", module, count=1))
            if name is not None:
                name = name if number is None else name.replace("*", number[1], 1)
                return name if whole else f"{name}.{rule.suffixes.get(suffix, suffix)}"
        return stored

    def checkpoint_name(self, module: str) -> str:
        """The name that checkpoints have for a module of the layers; the first one if they have several."""
        number = _NUMBER.search(module)
        pattern = module if number is None else _NUMBER.sub(".*.", module, count=1)
        stored = next((f"{rule.prefix}{name}" for rule in self._renames for name in _names_of(rule, pattern)), None)
        if stored is None:
            stored = module
        elif number is not None:
            stored = stored.replace("*", number[1], 1)
        for within, names in self._parts:
            stored = _with_parts(stored, within, {part: name for name, part in names.items()})
        return stored

    def split(self, name: str) -> tuple[str, ...]:
        """The names of the tensors that one of this name is divided into: itself, or those of the parts."""
        rule = self.split_rule(name)
        return (name,) if rule is None else tuple(name.replace(rule.matrix, path) for path in _paths(rule))

    def split_rule(self, name: str) -> Split | None:
        """The rule that divides a tensor of this name; None if it is not fused."""
        return next((rule for rule in self._splits if f".{rule.matrix}." in name), None)

    def fused(self, names: Sequence[str]) -> tuple[str, ...]:
        """The name of the fused matrix that consists of layers of these names; the names themselves if none does."""
        for rule in self._splits:
            paths = _paths(rule)
            start = names[0].removesuffix(paths[0])
            if start.endswith(".") and tuple(names) == tuple(start + path for path in paths):
                return (start + rule.matrix,)
        return tuple(names)

    def qkv(self) -> str | None:
        """The fused matrix of queries, keys and values, if there is one."""
        return next((rule.matrix for rule in self._splits if rule.parts == QKV), None)


def _with_parts(name: str, within: str, names: Mapping[str, str]) -> str:
    """A name with other parts, if it has the part `within`, or that is ""."""
    parts = name.split(".")
    return name if within and within not in parts else ".".join(names.get(part, part) for part in parts)


def _names_of(rule: Rename, pattern: str) -> list[str]:
    return [stored for stored, name in rule.names.items() if name == pattern]


def _paths(rule: Split) -> tuple[str, ...]:
    parent, dot, _ = rule.matrix.rpartition(".")
    return tuple(f"{parent}{dot}{part}" for part in rule.parts)


def _divided(name: str) -> tuple[str, str]:
    """The module of a tensor, and the rest of its name: bitsandbytes has "weight.absmax" and others below a weight."""
    module, below, rest = name.partition(".weight.")
    if below:
        return module, f"weight.{rest}"
    module, _, suffix = name.rpartition(".")
    return module, suffix

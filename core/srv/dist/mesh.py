"""How the ranks of an engine divide a model: one value, from resolution to the worker. Torch-free.

The same `tensor` ranks are cut along several axes. Attention is divided among replicas first, then by heads. Experts
are an overlay on the same ranks: whole experts first, then slices of each.

    tensor 8, replicas 2, experts 4         rank        0   1   2   3 │ 4   5   6   7
                                            replica     0   0   0   0 │ 1   1   1   1
                                            heads       0   1   2   3 │ 0   1   2   3      of 4
                                            experts     0   0   1   1 │ 2   2   3   3      of 4
                                            slice       0   1   0   1 │ 0   1   0   1      of 2

Must not know devices, collectives, or what is divided along an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from srv.dist.group import RankGroup

Axis: TypeAlias = Literal["tensor", "heads", "replicas", "experts", "slices", "vocabulary", "embedding"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Mesh:
    """`tensor`: ranks that compute each step together. `replicas`: of attention, each with requests of its own.

    `experts`: ranks, or groups of ranks that hold slices, among which whole experts are distributed. `own_vocabulary`:
    each replica divides the output layer among its own ranks only, as it does the embedding.
    """

    tensor: int = 1
    replicas: int = 1
    experts: int = 1
    own_vocabulary: bool = False

    @property
    def ranks_per_replica(self) -> int:
        return self.tensor // self.replicas

    def width(self, axis: Axis) -> int:
        """How many ranks a group of this axis has."""
        match axis:
            case "tensor":
                return self.tensor
            case "heads" | "embedding":
                return self.ranks_per_replica
            case "replicas":
                return self.replicas
            case "experts":
                return self.experts
            case "slices":
                return self.tensor // self.experts
            case "vocabulary":
                return self.ranks_per_replica if self.own_vocabulary else self.tensor

    def stride(self, axis: Axis) -> int:
        """The distance between neighbours in a group of this axis."""
        match axis:
            case "replicas":
                return self.ranks_per_replica
            case "experts":
                return self.width("slices")
            case _:
                return 1

    def members(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks of the group that `rank` is in, in their order there."""
        width, stride = self.width(axis), self.stride(axis)
        first = rank - rank // stride % width * stride
        return tuple(range(first, first + width * stride, stride))

    def group(self, axis: Axis, of: RankGroup) -> RankGroup:
        """The group of this axis that a member of the group of all ranks, `of`, is in."""
        members = self.members(axis, of.rank)
        return replace(of, name=f"{axis}-{members[0]}", rank=members.index(of.rank), size=len(members))

    def obstacles(self) -> Iterator[str]:
        """Clauses that say which sizes do not fit one another."""
        for name, size in (("replicas of attention", self.replicas), ("groups of experts", self.experts)):
            if self.tensor % size:
                yield f"{self.tensor} ranks cannot be divided into {size} {name}"


def mesh_of(value: Callable[[str], Any]) -> Mesh:
    """The mesh that arguments ask for. `value`: that of an argument by its name; None if it is not known yet.

    Without what does not fit the number of ranks, which is refused: a plan goes on with the rest.
    """
    fitting = Mesh(value("tp_size") or 1)
    for change in (
        {"replicas": (value("dp_size") or 1) if value("enable_dp_attention") else 1},
        {"experts": value("ep_size") or 1},
        {"own_vocabulary": bool(value("enable_dp_lm_head"))},
    ):
        mesh = replace(fitting, **change)
        fitting = fitting if any(mesh.obstacles()) else mesh
    return fitting


def all_ranks(value: Callable[[str], Any]) -> int:
    """The ranks of all replicas of the model. `value`: as of `mesh_of`."""
    replicas = 1 if value("enable_dp_attention") else value("dp_size") or 1
    return int((value("tp_size") or 1) * replicas)


def rank_on_host(value: Callable[[str], Any], replica: int, group: RankGroup) -> int:
    """The number of a rank among those of all replicas. `group`: of the ranks that compute each step together.

    `value`: as of `mesh_of`.
    """
    return group.rank if value("enable_dp_attention") else replica * group.size + group.rank

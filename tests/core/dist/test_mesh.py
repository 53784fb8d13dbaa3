"""The mesh of an engine's ranks: its groups along each axis."""

from __future__ import annotations

from every import every

from srv.dist.group import RankGroup
from srv.dist.mesh import AXES, Mesh

MESHES = (Mesh(), Mesh(4), Mesh(8, replicas=2, experts=4), Mesh(8, prompt=4, experts=8), Mesh(16, 2, 4, 2))


def test_the_groups_of_the_picture() -> None:
    mesh = Mesh(8, replicas=2, experts=4)
    assert [mesh.members("heads", rank)[0] for rank in range(8)] == [0] * 4 + [4] * 4
    assert [mesh.group("heads", RankGroup(rank=rank, size=8)).rank for rank in range(8)] == [0, 1, 2, 3] * 2
    assert [mesh.group("experts", RankGroup(rank=rank, size=8)).rank for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [mesh.group("slices", RankGroup(rank=rank, size=8)).rank for rank in range(8)] == [0, 1] * 4
    assert mesh.members("replicas", 5) == (1, 5)
    assert mesh.members("experts", 5) == (1, 3, 5, 7)


@every("mesh", list(MESHES))
def test_the_groups_of_an_axis_are_a_partition(mesh: Mesh) -> None:
    """Every rank is in one group of each axis; all of its members agree on it, and on their numbers in it."""
    assert not list(mesh.obstacles())
    for axis in AXES:
        groups = {mesh.members(axis, rank) for rank in range(mesh.tensor)}
        assert sorted(rank for members in groups for rank in members) == list(range(mesh.tensor))
        for members in groups:
            own = [mesh.group(axis, RankGroup(rank=rank, size=mesh.tensor)) for rank in members]
            assert [group.rank for group in own] == list(range(mesh.width(axis)))
            assert {(group.name, group.size) for group in own} == {(f"{axis}-{members[0]}", len(members))}


@every(
    ("mesh", "clause"),
    [
        (Mesh(6, replicas=4), "6 ranks cannot be divided into 4 replicas of attention"),
        (Mesh(8, replicas=4, prompt=4), "8 ranks cannot be divided into 16 replicas and parts of a prompt"),
        (Mesh(8, experts=3), "8 ranks cannot be divided into 3 groups of experts"),
        (Mesh(8, nodes=3), "8 ranks cannot be divided into 3 machines"),
    ],
)
def test_sizes_that_do_not_fit_one_another(mesh: Mesh, clause: str) -> None:
    assert clause in list(mesh.obstacles())

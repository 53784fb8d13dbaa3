"""The mesh of an engine's ranks: its groups along each axis."""

from __future__ import annotations

from every import every

from srv.dist.group import RankGroup
from srv.dist.mesh import AXES, Mesh, all_ranks, mesh_of, rank_on_host

MESHES = (Mesh(), Mesh(4), Mesh(8, replicas=2, experts=4), Mesh(8, replicas=8, experts=8), Mesh(16, 4, 2, True))


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
        (Mesh(8, experts=3), "8 ranks cannot be divided into 3 groups of experts"),
    ],
)
def test_sizes_that_do_not_fit_one_another(mesh: Mesh, clause: str) -> None:
    assert clause in list(mesh.obstacles())


@every(
    ("arguments", "mesh"),
    [
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "ep_size": 4}, Mesh(4, 2, 4)),
        ({"tp_size": 4, "dp_size": 2}, Mesh(4)),
        ({"tp_size": 4, "dp_size": 3, "enable_dp_attention": True, "ep_size": 2}, Mesh(4, experts=2)),
        ({"tp_size": 1, "ep_size": 2}, Mesh(1)),
    ],
)
def test_what_does_not_fit_is_left_out(arguments: dict[str, int], mesh: Mesh) -> None:
    assert mesh_of(arguments.get) == mesh


def test_every_rank_has_a_number_of_its_own_on_the_host() -> None:
    """Of replicas with ranks of their own, and of those that share theirs."""
    for shared in (False, True):
        arguments = {"tp_size": 4, "dp_size": 2, "enable_dp_attention": shared}
        of_replica = [range(2 * replica, 2 * replica + 2) if shared else range(4) for replica in range(2)]
        numbers = [
            rank_on_host(arguments.get, replica, RankGroup(rank=rank, size=4))
            for replica, ranks in enumerate(of_replica)
            for rank in ranks
        ]
        assert numbers == list(range(all_ranks(arguments.get)))

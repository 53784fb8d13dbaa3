"""The radix tree: matching, splitting, locking, eviction order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from every import every

from srv.errors import IntegrityError
from srv.memory.groups import PageGroup
from srv.memory.radix import Match, RadixTree


def tree_of(*texts: tuple[int, ...], page_size: int = 2) -> tuple[RadixTree, dict[tuple[int, ...], tuple[int, ...]]]:
    """A tree with these token sequences inserted in order; their page ids count up from 1."""
    tree = RadixTree([PageGroup(99, page_size)])
    pages: dict[tuple[int, ...], tuple[int, ...]] = {}
    first = 1
    for text in texts:
        count = len(text) // page_size
        pages[text] = tuple(range(first, first + count))
        tree.insert("", text, [pages[text]], count)
        first += count
    tree.check_integrity()
    return tree, pages


def test_matches_whole_pages_only() -> None:
    tree, _ = tree_of((1, 2, 3, 4))
    assert tree.match("", (1, 2, 3, 4, 5), 9).units == 2
    assert tree.match("", (1, 2, 3), 9).units == 1
    assert tree.match("", (1, 2, 3, 9), 9).units == 1
    assert tree.match("", (1, 9, 3, 4), 9).units == 0


def test_limit_bounds_the_match() -> None:
    tree, _ = tree_of((1, 2, 3, 4, 5, 6))
    assert tree.match("", (1, 2, 3, 4, 5, 6), 2).units == 2
    assert tree.match("", (1, 2, 3, 4, 5, 6), 0).units == 0


@every("differs_at", range(20))
def test_a_long_node_matches_up_to_its_first_difference(differs_at: int) -> None:
    text = tuple(range(20))
    tree, _ = tree_of(text, page_size=1)
    other = tuple(99 if place == differs_at else token for place, token in enumerate(text))
    assert tree.match("", other, 20).units == differs_at


def test_namespaces_share_nothing() -> None:
    tree, _ = tree_of((1, 2))
    assert tree.match("tenant", (1, 2), 9).units == 0
    tree.insert("tenant", (1, 2), [(9,)], 1)
    node, pages = tree.acquire("tenant", (1, 2), 9)
    assert pages == ([9],)
    tree.unlock(node)
    assert tree.unlocked == 2


def test_insert_reports_pages_that_exist_and_adds_only_the_others() -> None:
    tree, _ = tree_of((1, 2, 3, 4))
    _, present = tree.insert("", (1, 2, 3, 4, 5, 6), [(11, 12, 13)], 3)
    assert present == 2
    node, pages = tree.acquire("", (1, 2, 3, 4, 5, 6), 9)
    assert pages == ([1, 2, 13],)
    tree.unlock(node)
    tree.check_integrity()


def test_a_branch_splits_a_node_and_keeps_both() -> None:
    tree, pages = tree_of((1, 2, 3, 4), (1, 2, 7, 8))
    assert tree.match("", (1, 2, 3, 4), 9).units == 2
    assert tree.match("", (1, 2, 7, 8), 9).units == 2
    assert tree.unlocked == 3  # the first page of the second sequence was already in the tree
    assert pages[1, 2, 7, 8][0] not in {page for node in tree.nodes() for page in node.pages[0]}


def test_a_lock_survives_a_split() -> None:
    tree, _ = tree_of((1, 2, 3, 4))
    node, _ = tree.acquire("", (1, 2, 3, 4), 9)
    tree.insert("", (1, 2, 7, 8), [(5, 6)], 2)
    tree.check_integrity()
    assert tree.evict(9) == ((6,),)
    tree.unlock(node)
    assert sorted(tree.evict(9)[0]) == [1, 2]


def test_match_has_the_number_of_evictable_pages_it_would_lock() -> None:
    tree, _ = tree_of((1, 2, 3, 4))
    node, _ = tree.acquire("", (1, 2), 9)
    match = tree.match("", (1, 2, 3, 4), 9)
    assert match == Match(units=2, tokens=4, held=(2,), trimmed=(0,), unlocked=(1,))
    tree.unlock(node)
    assert tree.match("", (1, 2, 3, 4), 9) == replace(match, unlocked=(2,))


def test_evicts_the_least_recently_used_leaf_first() -> None:
    tree, pages = tree_of((1, 1), (2, 2), (3, 3))
    node, _ = tree.acquire("", (1, 1), 9)
    tree.unlock(node)
    assert tree.evict(1) == (pages[2, 2],)
    assert tree.evict(1) == (pages[3, 3],)
    assert tree.evict(1) == (pages[1, 1],)


def test_evicts_leaves_before_their_parents() -> None:
    tree, _ = tree_of((1, 2, 3, 4), (1, 2, 7, 8))
    assert tree.evict(2)[0] == (2, 4)
    assert tree.evict(1)[0] == (1,)
    assert list(tree.nodes()) == []


def test_evicting_part_of_a_leaf_keeps_its_head() -> None:
    tree, _ = tree_of(tuple(range(8)), page_size=1)
    assert tree.evict(2) == ((7, 8),)
    assert tree.match("", tuple(range(8)), 9).units == 6
    tree.check_integrity()


def test_locked_pages_are_never_evicted() -> None:
    tree, _ = tree_of((1, 2, 3, 4))
    node, _ = tree.acquire("", (1, 2), 9)
    assert tree.evict(5) == ((2,),)
    assert tree.locked == 1
    with pytest.raises(IntegrityError, match="1 units are locked"):
        tree.clear()
    tree.unlock(node)
    assert tree.clear() == ((1,),)


def test_unlocking_too_often_raises() -> None:
    tree, _ = tree_of((1, 2))
    node, _ = tree.acquire("", (1, 2), 9)
    tree.unlock(node)
    with pytest.raises(IntegrityError, match="unlocked but not locked"):
        tree.unlock(node)


def test_a_namespace_without_pages_is_removed() -> None:
    tree, _ = tree_of()
    for number in range(50):
        node, pages = tree.acquire(f"tenant {number}", (1, 2), 9)
        assert pages == ([],)
        tree.unlock(node)
    assert list(tree.nodes()) == []


def test_version_changes_whenever_a_match_could_change() -> None:
    tree, _ = tree_of((1, 2, 3, 4))
    seen = [tree.version]
    node, _ = tree.acquire("", (1, 2), 9)
    seen.append(tree.version)
    tree.unlock(node)
    seen.append(tree.version)
    tree.evict(1)
    seen.append(tree.version)
    tree.insert("", (9, 9), [(7,)], 1)
    seen.append(tree.version)
    assert len(set(seen)) == len(seen)


def test_the_order_of_eviction_does_not_grow_with_use() -> None:
    tree, _ = tree_of((1, 2), (3, 4))
    for _ in range(1000):
        tree.unlock(tree.acquire("", (1, 2), 9)[0])
    assert len(tree._leaves) < 100
    assert tree.evict(1) == ((2,),)


def test_pages_of_all_cache_groups_are_evicted_together() -> None:
    tree = RadixTree([PageGroup(99, 2), PageGroup(99, 2)])
    tree.insert("", (1, 2, 3, 4), [(1, 2), (8, 9)], 2)
    node, pages = tree.acquire("", (1, 2, 3, 4), 1)
    assert pages == ([1], [8])
    assert tree.evict(9) == ((2,), (9,))
    tree.unlock(node)

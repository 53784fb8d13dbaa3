"""Which values of arguments a conformance run starts servers with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from srv.args.config import ARGUMENTS
from srv.args.prerequisites import with_prerequisite
from srv.testing.conformance.arguments import at_fault, needs_file


def test_no_value_is_tried_that_needs_a_file_of_the_user() -> None:
    """`with_prerequisite` would name a file that does not exist."""
    assert needs_file(ARGUMENTS["share_cache"])
    assert not needs_file(ARGUMENTS["is_embedding"])
    for argument in ARGUMENTS.values():
        if argument.kind.base is bool and not argument.arg.planned and not needs_file(argument):
            others = with_prerequisite(argument.name, not argument.default).keys() - {argument.name}
            assert not [name for name in others if "file" in name or name.endswith("_path")], argument.name


def test_of_values_that_fail_together_the_one_or_the_pair_is_found() -> None:
    values = range(20)
    for culprits in (*itertools.combinations(values, 1), *itertools.combinations(values, 2), (3, 4, 17)):
        launches: list[Sequence[int]] = []

        def fails(tried: Sequence[int], culprits: tuple[int, ...] = culprits) -> bool:
            launches.append(tried)  # noqa: B023 - called in this round of the loop only
            return set(culprits) <= set(tried)

        assert sorted(at_fault(values, fails)) == list(culprits)
        assert len(launches) <= 10 * len(culprits)

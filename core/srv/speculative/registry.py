"""The algorithms that propose drafts, by their names. Torch-free; drafters are imported by a worker.

    srv.drafters               <algorithm> = package.module:ALGORITHM                 (a third party's algorithm)

The file of an algorithm is imported when it is chosen. `srv.speculative.third_party` checks those of other
distributions (docs/adr/0026-hooks-and-stevedore.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from srv.platform.installed import entries
from srv.speculative.algorithm import GROUP, DraftAlgorithm
from srv.speculative.planned import PLANNED

# The module in this package, by the name of the algorithm.
BUILT_IN: Mapping[str, str] = MappingProxyType({"NGRAM": "ngram"})


def further_names() -> tuple[str, ...]:
    """The names of the algorithms of other distributions; none is loaded."""
    return tuple(dict.fromkeys(entry.name for entry in entries(GROUP)))


def find(name: str | None) -> DraftAlgorithm | None:
    """The algorithm of a name; None if there is none.

    Raises PluginError if a third party's algorithm of that name is faulty, or if two distributions claim the name.
    """
    if name is None:
        return None
    if name in further_names():
        from srv.speculative import third_party  # most installations do not need it

        return third_party.find(name, taken=name in BUILT_IN or name in PLANNED)
    return _built_in(name) if name in BUILT_IN else None


def _built_in(name: str) -> DraftAlgorithm:
    algorithm: DraftAlgorithm = importlib.import_module(f"{__package__}.{BUILT_IN[name]}").ALGORITHM
    return algorithm

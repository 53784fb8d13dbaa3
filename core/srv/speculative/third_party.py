"""Algorithms of other distributions: entry points of the group `srv.drafters`. Torch-free.

Must not know the algorithms of `srv` itself. `srv.platform.extensions` checks what is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.errors import PluginError
from srv.platform.extensions import Extensions
from srv.speculative.algorithm import GROUP, READABLE, VERIFIED_TOKENS, DraftAlgorithm, DraftSizes

ALGORITHMS = Extensions(
    GROUP,
    DraftAlgorithm,
    "draft algorithm",
    "docs/drafters.md",
    types={"name": str, "drafter": str, "reads": tuple, "defaults": Mapping},
    functions=("max_drafts", "device_bytes"),
    targets=("drafter",),
)


def find(name: str, *, taken: bool = False) -> DraftAlgorithm | None:
    """The algorithm of this name, whose functions name the distribution in their errors; or None.

    `taken`: `srv` has an algorithm of this name, which none may replace.
    """
    algorithm = ALGORITHMS.find(name, taken=taken)
    if algorithm is None:
        return None
    unknown = [argument for argument in algorithm.reads if argument not in READABLE]
    if unknown:
        raise fault(name, "reads", f"names {unknown[0]!r}, which is none of {', '.join(READABLE)}")
    unread = [default for default in algorithm.defaults if default not in (*algorithm.reads, VERIFIED_TOKENS)]
    if unread:
        raise fault(name, "defaults", f"has a value for {unread[0]!r}, which is not in `reads`")

    def max_drafts(values: Mapping[str, int]) -> int | None:
        most: object = ALGORITHMS.call(name, "max_drafts", algorithm.max_drafts, values)
        return None if most is None else _integer(name, "max_drafts", most, 1)

    def device_bytes(sizes: DraftSizes) -> int:
        needed: object = ALGORITHMS.call(name, "device_bytes", algorithm.device_bytes, sizes)
        return _integer(name, "device_bytes", needed, 0)

    return algorithm._replace(max_drafts=max_drafts, device_bytes=device_bytes)


def fault(name: str, member: str, reason: str) -> PluginError:
    """A fault in a member of the algorithm of this name."""
    return ALGORITHMS.error_in(ALGORITHMS.provider(name), f"{name}.{member}", reason)


def _integer(name: str, member: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise fault(name, member, f"returned {value!r}, not an integer of at least {least}")
    return value

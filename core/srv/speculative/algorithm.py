"""What core must know of an algorithm that proposes drafts, as data. Torch-free.

An algorithm is two files: its facts (a `DraftAlgorithm`), which `srv plan` reads without torch, and its drafter, which
is imported by a worker. Must not know any algorithm by name: `srv.speculative.registry` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

GROUP = "srv.drafters"  # the entry points of other distributions

VERIFIED_TOKENS = "speculative_num_draft_tokens"  # core reads it, whatever the algorithm
# The arguments that a drafter may read. All are integers.
READABLE = (
    "speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size",
    "speculative_ngram_branch_length",
)


class DraftSizes(NamedTuple):
    """The sizes that the memory of a drafter depends on.

    `rows`: requests that run at the same time, at most. `width`: tokens of one request, prompt and output, at most.
    """

    rows: int
    width: int
    vocab_size: int


def no_bytes(sizes: DraftSizes) -> int:
    """For drafters that hold nothing on the device."""
    return 0


def no_limit(values: Mapping[str, int]) -> int | None:
    """For drafters that can propose any number of tokens."""
    return None


class DraftAlgorithm(NamedTuple):
    """The facts of one algorithm.

    `name`: the value of `--speculative-algorithm`. `drafter`: "module:Class" of a `srv.speculative.drafter.Drafter`
    that is made with a `DrafterContext`. `reads`: the arguments of `READABLE` that it reads; a user who sets another
    one of them is refused. `defaults`: the values of these arguments, and of `speculative_num_draft_tokens`, unless a
    user or a platform sets them.

    `max_drafts(values)`: how many tokens it can propose at a time, from the values of the arguments that it reads; None
    if there is no limit. `device_bytes(sizes)`: bytes that the drafter holds on each device beyond the histories of all
    requests, at most; the memory budget reserves them.
    """

    name: str
    drafter: str
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, int] = MappingProxyType({})
    max_drafts: Callable[[Mapping[str, int]], int | None] = no_limit
    device_bytes: Callable[[DraftSizes], int] = no_bytes

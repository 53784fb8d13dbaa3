"""Commands that every rank of an engine carries out between two steps, and what a rank answers.

They travel from the API process through the engine to the ranks. This module must not know who sends or runs them.
"""

from __future__ import annotations

import msgspec


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Record what the steps compute, until StopProfile. `folder` is where the traces will be; it exists."""

    folder: str


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Stop recording, and write one trace per rank."""


class ReadMemory(msgspec.Struct, frozen=True, tag=True):
    """Read the peak of the memory that steps have needed."""


class StartExpertCounts(msgspec.Struct, frozen=True, tag=True):
    """Count the tokens that each expert gets, from nothing, until StopExpertCounts."""


class StopExpertCounts(msgspec.Struct, frozen=True, tag=True):
    """Count no more; the counts stay."""


class ReadExpertCounts(msgspec.Struct, frozen=True, tag=True):
    """Read the counts, and forget them."""


class ReadExpertLoad(msgspec.Struct, frozen=True, tag=True):
    """Read how evenly experts were used in all steps so far (`ExpertLoad`)."""


class ExpertCounts(msgspec.Struct, frozen=True):
    """How many tokens chose each expert in some steps.

    step: the number of the last one. steps, tokens: how many there were. counts: by layer, as `ExpertUsage.layers` has
    them, then by expert.
    """

    step: int
    steps: int
    tokens: int
    counts: list[list[int]]


class ExpertUsage(msgspec.Struct, frozen=True):
    """What a rank has counted. mode: that of `--expert-distribution-recorder-mode`.

    recording: whether it still counts. layers: the numbers of the layers with experts. records: one of all steps
    ("stat"), or one of each ("per_pass").
    """

    mode: str
    recording: bool
    layers: list[int]
    records: list[ExpertCounts]


class ExpertLoad(msgspec.Struct, frozen=True):
    """How evenly the experts of each layer were used; all three lists are by layer.

    layers: their numbers. mean: tokens per expert, added up over steps. busiest: the tokens of the expert that got most
    in a step, added up over steps.
    """

    layers: list[int]
    mean: list[float]
    busiest: list[int]


class Answer(msgspec.Struct, frozen=True):
    """What a rank answers: the files that it has written, or why the command failed.

    peak_bytes: what steps have needed at most, beyond what the start allocated; None if that is not known. experts: the
    answer to ReadExpertCounts. expert_load: the answer to ReadExpertLoad.
    """

    files: list[str] = []
    error: str | None = None
    peak_bytes: int | None = None
    experts: ExpertUsage | None = None
    expert_load: ExpertLoad | None = None


ExpertCommand = StartExpertCounts | StopExpertCounts | ReadExpertCounts | ReadExpertLoad
Command = StartProfile | StopProfile | ReadMemory | ExpertCommand

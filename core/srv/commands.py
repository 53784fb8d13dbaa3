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


class Answer(msgspec.Struct, frozen=True):
    """What a rank answers: the files that it has written, or why the command failed."""

    files: list[str] = []
    error: str | None = None


Command = StartProfile | StopProfile

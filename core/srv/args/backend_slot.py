"""The candidates for a slot, an argument that names a backend (`srv.args.backends` chooses among them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.args.statement import Statement
from srv.platform.facts import BackendSpec


class Candidate(NamedTuple):
    """A backend for a slot. `requires`: allowed values by argument. `reasons`: why it does not fit; () if it fits.

    `unmet`: the arguments of which the user set a value that it does not allow; there is a reason for each.
    """

    slot: str
    spec: BackendSpec
    requires: Mapping[str, tuple[Any, ...]]
    reasons: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()


class BackendSlot(NamedTuple):
    """A slot and its candidates, best first. `user_choice`: the statement in which the user named a backend, if any."""

    name: str
    family: str
    candidates: tuple[Candidate, ...]
    user_choice: Statement | None

    def eligible(self) -> tuple[Candidate, ...]:
        """The candidates that fit; if the user named a backend, only that one."""
        return tuple(
            candidate
            for candidate in self.candidates
            if not candidate.reasons and (not self.user_choice or candidate.spec.name == self.user_choice.value)
        )

"""Finds where a text that arrives in parts first matches a regular expression.

Owns the automaton of Glushkov (1961), and what of a text may be released while a match is possible. Each character of
the expression, with repetitions written out, is one state, and a set of states is one integer. A character costs at
most one operation per state, whatever the expression and the text are: no expression makes the search backtrack.

The match that ends first wins, and of those that end together the longest. That does not depend on how the text is
split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from srv.errors import RequestError
from srv.server.text.regex_syntax import Characters, Node, RegexChoice, Repeat, parse, size
from srv.server.text.regex_syntax import Sequence as Parts

MAX_STATES = 128  # of all expressions of a request; a bound on the time per character
MAX_NODES = 8 * MAX_STATES  # of their trees, written out; a bound on the time to build the automaton
MAX_CACHED = 1024  # entries of each cache of an automaton


class _Fragment(NamedTuple):
    """An automaton's part: whether it matches the empty text, and the states in which a match begins and ends."""

    empty: bool
    first: int
    last: int


_NOTHING = _Fragment(True, 0, 0)


def _bits(states: int) -> Iterator[int]:
    while states:
        lowest = states & -states
        yield lowest.bit_length() - 1
        states ^= lowest


class StopRegex:
    """The automaton of a few regular expressions. Raises RequestError, with the reason alone, for refused ones.

    It is shared by the outputs of a request, and used from one thread.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._follow: list[int] = []  # the states that may follow each state
        self._accepts: dict[Characters, int] = {}  # the states that take a character of this set
        self.first = self.final = self._nodes = 0
        self._finals: list[tuple[int, str]] = []
        for pattern in patterns:
            self._add(pattern)
        self._reachable: dict[int, int] = {}
        self._taking: dict[str, int] = {}

    def _add(self, pattern: str) -> None:
        tree = parse(pattern)
        needed = size(tree)
        self._nodes += needed.nodes
        if self._nodes > MAX_NODES or len(self._follow) + needed.characters > MAX_STATES:
            raise RequestError(
                f"it is too large: with repetitions written out, the expressions of a request may have {MAX_STATES}"
                " characters in all",
                code="invalid_value",
            )
        fragment = self._build(tree)
        if fragment.empty:
            raise RequestError("it matches the empty text, which would stop every output", code="invalid_value")
        self.first |= fragment.first
        self.final |= fragment.last
        self._finals.append((fragment.last, pattern))

    def _build(self, node: Node) -> _Fragment:
        match node:
            case Characters():
                state = 1 << len(self._follow)
                self._follow.append(0)
                self._accepts[node] = self._accepts.get(node, 0) | state
                return _Fragment(False, state, state)
            case RegexChoice(options):
                built = [self._build(option) for option in options]
                return _Fragment(
                    any(option.empty for option in built),
                    sum(option.first for option in built),
                    sum(option.last for option in built),
                )
            case Parts(parts):
                whole = _NOTHING
                for part in parts:
                    whole = self._join(whole, self._build(part))
                return whole
            case Repeat(part, least, most):
                return self._repeat(part, least, most)

    def _repeat(self, part: Node, least: int, most: int | None) -> _Fragment:
        whole = last = _NOTHING
        for count in range(max(1, least) if most is None else most):
            last = self._build(part)
            whole = self._join(whole, last._replace(empty=last.empty or count >= least))
        if most is None:
            self._connect(last.last, last.first)
        return whole

    def _join(self, left: _Fragment, right: _Fragment) -> _Fragment:
        self._connect(left.last, right.first)
        return _Fragment(
            left.empty and right.empty,
            left.first | (right.first if left.empty else 0),
            right.last | (left.last if right.empty else 0),
        )

    def _connect(self, before: int, after: int) -> None:
        for state in _bits(before):
            self._follow[state] |= after

    def reachable(self, states: int) -> int:
        """The states that may follow any of these, whatever the next character is."""
        if (following := self._reachable.get(states)) is None:
            if len(self._reachable) >= MAX_CACHED:
                self._reachable.clear()
            following = 0
            for state in _bits(states):
                following |= self._follow[state]
            self._reachable[states] = following
        return following

    def taking(self, character: str) -> int:
        """The states that take this character."""
        if (taking := self._taking.get(character)) is None:
            if len(self._taking) >= MAX_CACHED:
                self._taking.clear()
            taking = sum(states for characters, states in self._accepts.items() if character in characters)
            self._taking[character] = taking
        return taking

    def matched(self, states: int) -> str:
        """The first of the expressions that end in one of these states."""
        return next(pattern for final, pattern in self._finals if states & final)


class RegexMatcher:
    """Searches one text. `include`: the match belongs to the released text, so that nothing is ever held back."""

    def __init__(self, regex: StopRegex, include: bool) -> None:
        self._regex, self._include = regex, include
        self._held, self._position = "", 0  # text that is held back; the number of characters read
        # Where matches may have begun, in order, with their states. A state that several reach is the first one's.
        self._begun: list[tuple[int, int]] = []

    def feed(self, text: str, final: bool) -> tuple[str, str | None]:
        """(text that is safe to release, the expression that matched or None). `final`: no more text follows."""
        pending, begin = self._held + text, self._position - len(self._held)
        for character in text:
            self._position += 1
            if (match := self._step(character)) is not None:
                start, pattern = match
                return pending[: (self._position if self._include else start) - begin], pattern
        safe = self._begun[0][0] if self._begun and not (self._include or final) else self._position
        self._held = pending[safe - begin :]
        return pending[: safe - begin], None

    def _step(self, character: str) -> tuple[int, str] | None:
        """Read a character; returns the start and the expression of a match that ends with it."""
        regex = self._regex
        takes, taken = regex.taking(character), 0
        begun: list[tuple[int, int]] = []
        for start, states in (*self._begun, (self._position - 1, 0)):
            follow = regex.reachable(states) if states else regex.first
            states = follow & takes & ~taken
            if states:
                taken |= states
                begun.append((start, states))
        self._begun = begun
        if not taken & regex.final:
            return None
        return next((start, regex.matched(states)) for start, states in begun if states & regex.final)

"""Incremental detokenization: turns tokens into text that can be sent, and finds stop strings.

Owns stop string matching and the number of tokens that the released text contains. Must not know how a token is
decoded (`TokenStream`) or who reads the text.

    tokens --stream--> complete characters --matcher--> text without a stop string --regex--> released text
         (incomplete UTF-8 waits)        (a possible stop string waits)        (a possible match waits)

The stop string that starts first wins; of those that start together, the shortest. The result does not depend on how
the tokens are split into calls of `push`, and equals a search for the stop strings in the complete text, then for
regular expressions (`srv.server.text.stop_regex`) in the text before the stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from srv.errors import RequestError
from srv.server.text.processor import TextDelta
from srv.server.text.stop_regex import RegexMatcher, StopRegex
from srv.server.text.tokenizers.codec import TokenStream


class StopMatcher:
    """Finds the first stop string in a text that arrives in parts.

    For each stop string it stores the first position in the held text at which the string could start. The position
    only moves forward, so the cost is linear in the text, even for repetitive stop strings.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if "" in stops:
            raise RequestError("an empty stop string would stop every output", code="invalid_stop", param="stop")
        self._stops, self._include = tuple(stops), include
        self._candidates = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str, final: bool) -> tuple[str, str | None]:
        """(text that is safe to release, the stop string found or None). `final`: no more text follows."""
        pending = self._held = self._held + text
        safe_end = len(pending)  # no stop string can start before this position
        earliest: tuple[int, int] | None = None  # start and length
        for index, stop in enumerate(self._stops):
            position, complete = self._next(stop, self._candidates[index])
            self._candidates[index] = position
            if not complete:
                safe_end = min(safe_end, position)
            elif earliest is None or (position, len(stop)) < earliest:
                earliest = (position, len(stop))
        if earliest is not None and (final or earliest[0] <= safe_end):
            start, end = earliest[0], earliest[0] + earliest[1]
            return pending[: end if self._include else start], pending[start:end]
        if final:
            safe_end = len(pending)
        elif earliest is not None:
            safe_end = min(safe_end, earliest[0])
        self._held = pending[safe_end:]
        self._candidates = [max(0, position - safe_end) for position in self._candidates]
        return pending[:safe_end], None

    def _next(self, stop: str, position: int) -> tuple[int, bool]:
        """(first position from `position` on at which `stop` starts or could start, whether it is complete there)."""
        pending, size = self._held, len(self._held)
        while (position := pending.find(stop[0], position)) >= 0:
            if size - position >= len(stop):
                if pending.startswith(stop, position):
                    return position, True
            elif stop.startswith(pending[position:]):
                return position, False
            position += 1
        return size, False


class IncrementalDetokenizer:
    """`srv.server.text.processor.Detokenizer` over a stream of tokens.

    The text of a token starts with the character that contains its first byte. The token counts as used when a
    character at or after that position is released; one without text counts with its predecessor, or immediately if it
    has none.
    """

    def __init__(
        self, stream: TokenStream, stop: Sequence[str], include_stop: bool, regex: StopRegex | None = None
    ) -> None:
        self._stream, self._include_stop = stream, include_stop
        self._regex = None if regex is None else RegexMatcher(regex, include_stop)
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._starts: deque[int | None] = deque()  # start positions of tokens not yet counted as used
        self._produced = self._released = self._used = 0
        self._stop_string: str | None = None

    def push(self, tokens: Sequence[int], final: bool) -> TextDelta:
        """See `Detokenizer.push`."""
        parts: list[str] = []
        for token in tokens:
            if self._stop_string is not None:
                break
            text, start = self._stream.feed(token)
            self._starts.append(None if start is None else self._produced + start)
            self._release(parts, text)
        if final and self._stop_string is None:
            self._release(parts, self._stream.finish(), final=True)
            if self._stop_string is None:
                self._used += len(self._starts)
                self._starts.clear()
        self._count_used()
        return TextDelta("".join(parts), self._stop_string, self._used)

    def _release(self, parts: list[str], text: str, final: bool = False) -> None:
        self._produced += len(text)
        if self._matcher is not None and (text or final):
            text, self._stop_string = self._matcher.feed(text, final)
        if self._regex is not None:
            text = self._search(self._regex, text, final or self._stop_string is not None)
        if text:
            self._released += len(text)
            parts.append(text)

    def _search(self, regex: RegexMatcher, text: str, final: bool) -> str:
        """What may be released of a text that is free of stop strings but for one at its end."""
        stop = self._stop_string if self._include_stop else None
        stop_text = stop or ""
        text, pattern = regex.feed(text.removesuffix(stop_text), final)
        if pattern is None:
            return text + stop_text
        self._stop_string = pattern
        return text

    def _count_used(self) -> None:
        starts, released = self._starts, self._released
        while starts and ((start := starts[0]) is None or start < released):
            starts.popleft()
            self._used += 1

"""Text that arrives in parts, read by coroutines that wait for more.

    reader = Reader(); coroutine = parse(reader)
    reader.push(delta); next(coroutine)        # runs until it needs more text
    reader.close(cut=False); next(coroutine, None)      # no more comes

What a coroutine does depends on the text alone and never on how it was cut into parts: it decides nothing that more
text could change.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")


class Found(NamedTuple):
    """`marker` begins at `position`; without one ("") none begins before `position`."""

    position: int
    marker: str


class MarkerSet:
    """Finds the first of several markers; of those that begin together, the longest."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(sorted({marker for marker in markers if marker}, key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.markers))) if self.markers else None
        self._longest = len(self.markers[0]) if self.markers else 0

    def find(self, text: str, start: int, closed: bool) -> Found:
        """The first marker from `start` on that no more text can change. `closed`: no more text comes."""
        if self._pattern is None:
            return Found(len(text), "")
        match = self._pattern.search(text, start)
        if not closed:
            end = len(text) if match is None else match.start() + 1
            open_at = self._open(text, max(start, len(text) - self._longest + 1), end)
            if open_at is not None:
                return Found(open_at, "")
        return Found(len(text), "") if match is None else Found(match.start(), match[0])

    def _open(self, text: str, start: int, end: int) -> int | None:
        """The first position at which a marker begins that the end of the text cuts."""
        for position in range(start, end):
            size = len(text) - position
            rest = text[position:]
            if any(len(marker) > size and marker.startswith(rest) for marker in self.markers):
                return position
        return None


class Reader:
    """The text that is not used up, and the position in it that a coroutine has reached.

    Text before the position can be read again until `drop`. `cut`: the text is over because a limit was reached.
    """

    __slots__ = ("at", "closed", "cut", "dropped", "text")

    def __init__(self) -> None:
        self.text, self.at, self.closed, self.cut, self.dropped = "", 0, False, False, 0

    def push(self, text: str) -> None:
        self.text += text

    def close(self, cut: bool) -> None:
        self.closed, self.cut = True, cut

    def drop(self) -> None:
        """Forget the text before the position."""
        self.dropped += self.at
        self.text, self.at = self.text[self.at :], 0

    @property
    def position(self) -> int:
        """The number of characters read so far."""
        return self.dropped + self.at

    @property
    def ended(self) -> bool:
        return self.closed and self.at >= len(self.text)

    def more(self) -> Wait[bool]:
        """Wait for more text; False if none comes."""
        size = len(self.text)
        while len(self.text) == size:
            if self.closed:
                return False
            yield
        return True

    def skip_space(self) -> Wait[None]:
        while True:
            match = _SPACES.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def peek(self) -> Wait[str]:
        """The next character; "" at the end of the text."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def starts(self, markers: Iterable[str]) -> Wait[str]:
        """The longest of the markers that begins here, or ""."""
        markers = [marker for marker in markers if marker]
        longest = max(map(len, markers), default=0)
        while markers:
            rest = self.text[self.at : self.at + longest]
            is_open = any(len(marker) > len(rest) and marker.startswith(rest) for marker in markers)
            if not is_open or not (yield from self.more()):
                return max((marker for marker in markers if rest.startswith(marker)), key=len, default="")
        return ""

    def accept(self, markers: Iterable[str]) -> Wait[str]:
        """As `starts`, and moves behind the marker."""
        marker = yield from self.starts(markers)
        self.at += len(marker)
        return marker

    def accept_behind_space(self, markers: Iterable[str]) -> Wait[str]:
        """As `accept`, with white space before the marker. The position stays if there is none."""
        begin = self.at
        yield from self.skip_space()
        marker = yield from self.accept(markers)
        self.at = self.at if marker else begin
        return marker

    def until(self, markers: MarkerSet, limit: int) -> Wait[str | None]:
        """The text before the next marker, which stays unread. None if it is longer than `limit`, or no marker comes;
        the position does not change then."""
        while True:
            match = markers.find(self.text, self.at, self.closed)
            if match.position - self.at > limit:
                return None
            if match.marker:
                text, self.at = self.text[self.at : match.position], match.position
                return text
            if not (yield from self.more()):
                return None

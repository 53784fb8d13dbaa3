"""Tokens become text that may be sent: stop strings matched, what is not yet certain held back.

Owns the matching of stop strings and the count of tokens that the released text is made of. Must not know
what a token is (`TokenStream` does) nor who reads the text.

    tokens --stream--> certain characters --matcher--> released text
                 (unfinished UTF-8 waits)       (what could begin a stop string waits)

Which match: the one that begins first; of those that begin together, the shortest. The same for every way of
cutting the tokens into pushes, and the same as looking for the stop strings in the whole text at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from srv.errors import RequestError
from srv.server.text.processor import Piece
from srv.server.text.tokenizers.codec import TokenStream


class StopMatcher:
    """Finds the first stop string in a text that comes in parts.

    For each stop string it remembers the first place in the held text that could be its beginning; the place
    only moves forward, so the work is linear in the text however the stop strings repeat themselves.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if "" in stops:
            raise RequestError("an empty stop string would stop every answer", code="invalid_stop", param="stop")
        self._stops, self._include = tuple(stops), include
        self._places = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str, final: bool) -> tuple[str, str | None]:
        """(text that no stop string can cut any more, the stop string found). `final`: no more will come."""
        held = self._held = self._held + text
        certain = len(held)  # every character before it is outside any stop string
        found: tuple[int, int] | None = None  # where it begins, and its length
        for index, stop in enumerate(self._stops):
            place, whole = self._next(stop, self._places[index])
            self._places[index] = place
            if not whole:
                certain = min(certain, place)
            elif found is None or (place, len(stop)) < found:
                found = (place, len(stop))
        if found is not None and (final or found[0] <= certain):
            begin, end = found[0], found[0] + found[1]
            return held[: end if self._include else begin], held[begin:end]
        if final:
            certain = len(held)
        elif found is not None:
            certain = min(certain, found[0])
        self._held = held[certain:]
        self._places = [max(0, place - certain) for place in self._places]
        return held[:certain], None

    def _next(self, stop: str, place: int) -> tuple[int, bool]:
        """The first place from `place` on where `stop` stands, or could once more text comes; is it whole?"""
        held, size = self._held, len(self._held)
        while (place := held.find(stop[0], place)) >= 0:
            if size - place >= len(stop):
                if held.startswith(stop, place):
                    return place, True
            elif stop.startswith(held[place:]):
                return place, False
            place += 1
        return size, False


class IncrementalDetokenizer:
    """`srv.server.text.processor.Detokenizer` over a stream of tokens.

    A token's text begins with the character that its first byte belongs to. The token counts as used once a
    character at or after that place is released; one without text counts with its predecessor (without one,
    at once).
    """

    def __init__(self, stream: TokenStream, stop: Sequence[str], include_stop: bool) -> None:
        self._stream = stream
        self._matcher = StopMatcher(stop, include_stop) if stop else None
        self._begins: deque[int | None] = deque()  # of the tokens not yet counted as used
        self._produced = self._released = self._used = 0
        self._stopped: str | None = None

    def push(self, tokens: Sequence[int], final: bool) -> Piece:
        """See `Detokenizer.push`. Tokens pushed after a stop string was found are ignored."""
        parts: list[str] = []
        for token in tokens:
            if self._stopped is not None:
                break
            text, begin = self._stream.feed(token)
            self._begins.append(None if begin is None else self._produced + begin)
            self._release(parts, text)
        if final and self._stopped is None:
            self._release(parts, self._stream.finish(), final=True)
            if self._stopped is None:
                self._used += len(self._begins)
                self._begins.clear()
        self._count()
        return Piece("".join(parts), self._stopped, self._used)

    def _release(self, parts: list[str], text: str, final: bool = False) -> None:
        self._produced += len(text)
        if self._matcher is not None and (text or final):
            text, self._stopped = self._matcher.feed(text, final)
        if text:
            self._released += len(text)
            parts.append(text)

    def _count(self) -> None:
        begins, released = self._begins, self._released
        while begins and ((begin := begins[0]) is None or begin < released):
            begins.popleft()
            self._used += 1

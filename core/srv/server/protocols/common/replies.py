"""Responses that are one reply in parts: Anthropic's Messages, OpenAI's Responses.

A reply that is not streamed goes through the same events, so that both forms have the same parts and ids. Must not know
the events of a protocol.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from srv.reply.events import ReplyEvent
from srv.server.generation import OutputDelta
from srv.server.generation import Sequence as OutputSequence
from srv.server.http.events import named_event
from srv.server.protocols.common.endpoint import Formatter
from srv.server.protocols.common.reply_reader import ReplyReader
from srv.types import FinishReason

Event = dict[str, object]


def validity(sequence: OutputSequence) -> Event:
    """The extension field of a response whose output does not follow its grammar."""
    return {"structured_output_valid": False} if sequence.structured_output_valid is False else {}


class ReplyFormatter(Formatter):
    """Formats one reply. The methods of subclasses return the events to stream, in order."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader, self._started = reader, False

    @abstractmethod
    def start(self, sequence: OutputSequence) -> list[Event]:
        """Before the first part; the tokens of the prompt and those in the cache are known."""

    @abstractmethod
    def add(self, events: Sequence[ReplyEvent], delta: OutputDelta) -> list[Event]: ...

    @abstractmethod
    def end(self, sequence: OutputSequence) -> list[Event]: ...

    @abstractmethod
    def fail(self, error: Exception) -> Event:
        """The end of a stream that failed."""

    def stream(self, delta: OutputDelta) -> bytes:
        return b"".join(map(named_event, self._events(delta)))

    def closing(self) -> bytes:
        return b""

    def failure(self, error: Exception) -> bytes:
        return named_event(self.fail(error))

    def collect(self, delta: OutputDelta) -> None:
        super().collect(delta)
        if delta.finish is not FinishReason.ABORT:
            self._events(delta)

    def _events(self, delta: OutputDelta) -> list[Event]:
        events = [] if self._started else self.start(delta.sequence)
        self._started = True
        events += self.add(self._reader.read(delta), delta)
        return events if delta.finish is None else [*events, *self.end(delta.sequence)]

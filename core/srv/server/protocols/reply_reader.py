"""The events of one output sequence, how many of its tokens are reasoning, and the grammar that it follows."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from srv.errors import RequestError
from srv.grammar.source import from_structural_tag
from srv.reply.events import ReplyEvent, Text
from srv.reply.formats import ReplyFormat
from srv.reply.parser import ParserOptions, ReplyParser
from srv.server.generation import OutputDelta, Sequence
from srv.server.sampling_fields import Sampling
from srv.types import FinishReason


class TokenPositions:
    """Where tokens end in a text, as far as its deltas say: within a delta of several, each has an equal share."""

    def __init__(self) -> None:
        self._characters, self._tokens = [0], [0]

    def add(self, characters: int, tokens: int) -> None:
        self._characters.append(self._characters[-1] + characters)
        self._tokens.append(self._tokens[-1] + tokens)

    def count(self, begin: int, end: int) -> int:
        """The number of tokens between two positions in the text."""
        return self._before(end) - self._before(begin)

    def _before(self, position: int) -> int:
        after = bisect_left(self._characters, position)
        if after == 0:
            return 0
        if after == len(self._characters):
            return self._tokens[-1]
        first, size = self._characters[after - 1], self._characters[after] - self._characters[after - 1]
        tokens = self._tokens[after] - self._tokens[after - 1]
        return self._tokens[after - 1] - -tokens * (position - first) // size


class ReplyReader:
    """Reads the deltas of one sequence in order. `parser`: None if the reply is nothing but text."""

    def __init__(self, parser: ReplyParser | None) -> None:
        self._parser, self._positions = parser, TokenPositions()

    def read(self, delta: OutputDelta) -> list[ReplyEvent]:
        return self.read_part(delta.sequence, delta.text, len(delta.tokens), delta.finish)

    def read_part(self, sequence: Sequence, text: str, tokens: int, finish: FinishReason | None) -> list[ReplyEvent]:
        """The events of more text. `finish`: why no more comes; None: more may come."""
        if self._parser is None:
            return [Text(text)] if text else []
        events = self._parser.feed(text)
        if finish is not None:
            events += self._parser.finish(cut=finish is not FinishReason.STOP)
        self._positions.add(len(text), tokens)
        sequence.reasoning_tokens = sum(self._positions.count(begin, end) for begin, end in self._parser.thought())
        return events

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return 0 if self._parser is None else self._parser.calls


def constrained(
    sampling: Sampling, replies: ReplyFormat, options: ParserOptions, prompt: str, calls_before: int
) -> Sampling:
    """The parameters with the grammar of the calls that the request forces, which begins behind the reasoning.

    Raises RequestError if the format has no such grammar, or the request has another one.
    """
    forced = replies.constraint(options.use, calls_before)
    begins_after = replies.reasoning_end(prompt, options.continued)
    if forced is None:
        if sampling.grammar is None or not begins_after or sampling.grammar.begins_after:
            return sampling
        later = msgspec.structs.replace(sampling.grammar, begins_after=begins_after)
        return msgspec.structs.replace(sampling, grammar=later)
    if sampling.grammar is not None:
        raise RequestError(
            f"{sampling.grammar.param} is refused with {forced.param}: both constrain the output; send one of them",
            code="invalid_value",
            param=sampling.grammar.param,
        )
    source = from_structural_tag(forced.tag, param=forced.param, begins_after=begins_after)
    return msgspec.structs.replace(sampling, grammar=source)

"""From a conversation to the events of the replies to it, for all protocols.

    Conversation ─► prepare ─► prompt, with the grammar of forced calls; ReplyReaders: OutputDelta ─► ReplyEvents

Must not know the fields or events of a protocol.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import msgspec

from srv.errors import RequestError
from srv.grammar.source import from_structural_tag
from srv.reply.events import CallEnd, ReplyEvent, Text
from srv.reply.formats import ReplyFormat
from srv.reply.parser import ParserOptions, ReplyParser
from srv.reply.tools import count_calls
from srv.server.generation import OutputDelta
from srv.server.protocols.common.conversations import Conversation, render
from srv.server.protocols.common.thinking import AskedBudget, with_budget
from srv.server.request.prompt_request import PromptRequest, TokenizedPrompt
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service
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
        return self._tokens[after - 1] - -tokens * (position - first) // size  # rounded up


class ReplyReader:
    """Reads the deltas of one sequence in order. `parser`: None if the reply is nothing but text.

    `ends_cut`: the reply ended within the arguments of a call.
    """

    def __init__(self, parser: ReplyParser | None) -> None:
        self._parser, self._positions = parser, TokenPositions()
        self.ends_cut = False

    def read(self, delta: OutputDelta) -> list[ReplyEvent]:
        if self._parser is None:
            return [Text(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        if delta.finish is not None:
            # A stop string of the client cuts what it is found in, as a limit does.
            cut = delta.finish is not FinishReason.STOP or isinstance(delta.matched, str)
            events += self._parser.finish(cut)
            self.ends_cut = any(isinstance(event, CallEnd) and event.cut for event in events)
        self._positions.add(len(delta.text), len(delta.tokens))
        thought = self._parser.thought()
        delta.sequence.reasoning_tokens = sum(self._positions.count(begin, end) for begin, end in thought)
        return events

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return 0 if self._parser is None else self._parser.calls


def constrained(
    sampling: Sampling, reply_format: ReplyFormat, options: ParserOptions, prompt: str, calls_before: int
) -> Sampling:
    """The parameters with the grammar of the calls that the request forces, which begins behind the reasoning.

    Raises RequestError if the format has no such grammar, or the request has another one.
    """
    forced = reply_format.constraint(options.use, calls_before)
    begins_after = reply_format.reasoning_end(prompt, options.continued)
    if forced is None:
        if sampling.grammar is None or not begins_after or sampling.grammar.begins_after:
            return sampling
        grammar = msgspec.structs.replace(sampling.grammar, begins_after=begins_after)
        return msgspec.structs.replace(sampling, grammar=grammar)
    if sampling.grammar is not None:
        raise RequestError(
            f"{sampling.grammar.param} is refused with {forced.param}: both constrain the output; send one of them",
            code="invalid_value",
            param=sampling.grammar.param,
        )
    source = from_structural_tag(forced.tag, param=forced.param, begins_after=begins_after)
    source = msgspec.structs.replace(source, left_out=forced.left_out)
    return msgspec.structs.replace(sampling, grammar=source)


async def prepare(
    service: Service,
    conversation: Conversation,
    sampling: Sampling,
    *,
    field_of: Callable[[str], str],
    namespace: str,
    owner: str,
    separate_reasoning: bool = True,
    stream_reasoning: bool = True,
    truncate: int | None = None,
    clip: bool = False,
    thinking: AskedBudget | None = None,
) -> tuple[TokenizedPrompt, Callable[[], ReplyReader]]:
    """The prompt of a conversation, and a function that makes the reader of one reply to it. Raises RequestError.

    `field_of`, `owner`, `clip`: as in `PromptRequest`. `separate_reasoning`, `stream_reasoning`: as in `ParserOptions`.
    `truncate`: the field `truncate_prompt_tokens`. `thinking`: the limit of the reasoning.
    """
    preprocessor, reply_format = service.preprocessor, service.settings.reply_format
    options = ParserOptions(conversation.tools, separate_reasoning, stream_reasoning, conversation.continues_reply)
    reply_format.check(conversation.tools)
    text = await render(preprocessor, conversation)
    calls = count_calls(conversation.messages)
    sampling = constrained(sampling, reply_format, options, text, calls)
    if thinking is not None:
        sampling = await with_budget(sampling, thinking, options, text, service)
    (prompt,) = await preprocessor.prepare_all(
        [
            PromptRequest(
                text, sampling, conversation.param, field_of, namespace, reply_format.markers(options), clip, owner
            )
        ],
        default_max_tokens=None,
        special=False,  # the rendered template contains the special tokens
        keep=preprocessor.kept(truncate, sampling.max_tokens or 1),
    )
    return prompt, lambda: ReplyReader(reply_format.parser(options, text, calls))

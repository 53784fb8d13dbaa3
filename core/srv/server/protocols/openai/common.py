"""What both OpenAI endpoints share: their ids, the object around their choices, and the counts of tokens.

Must not know which fields a body has, except the shared ones.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from typing import ClassVar, NamedTuple

from starlette.requests import Request

from srv.errors import RequestError
from srv.server.generation import CompletedSequence, OutputDelta, Sequence
from srv.server.http.events import DONE, event
from srv.server.protocols.common.endpoint import Asked, Formatter, GeneratingEndpoint
from srv.server.protocols.openai.fields import ChatBody, CompletionBody, StreamOptions
from srv.server.settings import ServerSettings
from srv.types import FinishReason, TokenLogprob

Choice = dict[str, object]


class StreamedUsage(NamedTuple):
    """Where a stream contains token counts."""

    at_the_end: bool
    in_every_chunk: bool


class OpenAIFormatter(Formatter):
    """Puts choices into objects; a subclass formats the choices. `prefix`: of response ids."""

    prefix: ClassVar[str]
    object_type: ClassVar[str]
    chunk_object_type: ClassVar[str]

    def __init__(self, settings: ServerSettings, body: ChatBody | CompletionBody) -> None:
        self.id = body.own_id or f"{self.prefix}-{uuid.uuid4().hex}"
        self._frame: dict[str, object] = {
            "id": self.id,
            "object": self.chunk_object_type if body.stream else self.object_type,
            "created": int(time.time()),
            "model": settings.model_name,
            "system_fingerprint": settings.system_fingerprint,
            **({} if body.service_tier is None else {"service_tier": "default"}),
        }
        self._usage = streamed_usage(body.stream, body.stream_options)
        self._prompt_sent = False

    def opening_choices(self) -> list[Choice]:
        """The choices to stream before the first token."""
        return []

    def shared(self, sequence: Sequence, scores: list[TokenLogprob] | None) -> dict[str, object]:
        """What the response says about the prompt besides its choices. `scores`: of the prompt, if requested.

        A stream contains it with the first delta of its first sequence.
        """
        return {}

    @abstractmethod
    def chunk(self, delta: OutputDelta) -> list[Choice]:
        """The choices to stream for one delta."""

    @abstractmethod
    def choice(self, result: CompletedSequence) -> Choice:
        """The choice of one complete sequence."""

    def opening(self) -> bytes:
        counts = self._counts()
        return b"".join(self._event([choice], **counts) for choice in self.opening_choices())

    def stream(self, delta: OutputDelta) -> bytes:
        events, choices, counts = b"", self.chunk(delta), self._counts()
        for choice in choices:
            shared: dict[str, object] = {}
            if delta.sequence.index == 0 and not self._prompt_sent:
                self._prompt_sent, shared = True, self.shared(delta.sequence, delta.prompt_logprobs)
            events += self._event([with_validity(choice, delta.sequence)], **counts, **shared)
        return events

    def closing(self) -> bytes:
        return (self._event([], usage=self.group.usage().openai()) if self._usage.at_the_end else b"") + DONE

    def whole(self) -> object:
        choices = [with_validity(self.choice(result), result.sequence) for result in self.results]
        first = self.results[0]
        shared = self.shared(first.sequence, first.prompt_logprobs)
        return {**self._frame, "choices": choices, "usage": self.group.usage().openai(), **shared}

    def _counts(self) -> dict[str, object]:
        if self._usage.in_every_chunk:
            return {"usage": self.group.usage().openai()}
        # With include_usage every chunk but the last has "usage": null (OpenAI's reference).
        return {"usage": None} if self._usage.at_the_end else {}

    def _event(self, choices: list[Choice], **extra: object) -> bytes:
        return event({**self._frame, "choices": choices, **extra})


class OpenAIEndpoint(GeneratingEndpoint):
    """The request is not needed, so that `srv.LLM` can ask too."""

    finishes_aborted = True

    @abstractmethod
    async def ask(self, body: object, request: Request | None = None) -> Asked: ...


def finish_name(finish: FinishReason | None) -> str | None:
    return None if finish is None else finish.value


def with_validity(choice: Choice, sequence: Sequence) -> Choice:
    """The choice that ends a sequence says so if the output does not follow its grammar."""
    if sequence.structured_output_valid is False and choice.get("finish_reason") is not None:
        return {**choice, "structured_output_valid": False}
    return choice


def streamed_usage(stream: bool | None, options: StreamOptions | None) -> StreamedUsage:
    """Where usage is streamed. Raises RequestError for stream_options that ask for something without stream."""
    if options is None:
        return StreamedUsage(False, False)
    if not stream and (options.include_usage or options.continuous_usage_stats):
        raise RequestError(
            "stream_options is refused: it needs stream = true; set that or remove it",
            code="invalid_value",
            param="stream_options",
        )
    return StreamedUsage(bool(options.include_usage), bool(options.continuous_usage_stats))

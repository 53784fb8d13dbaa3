"""The process that renders chat templates: `python -m srv.server.text.template_child`.

Owns the content of the frames between the two processes: a `TemplateSetup`, then one `TemplateConversation` after
another, each answered by a `TemplateReply`, in JSON. Must not know who started it or what becomes of a text. The child
ends when its standard input ends.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import msgspec

from srv.errors import ModelError, RequestError
from srv.io.bounded_child import channels, ignore_signals, limit_memory, limit_time, read_frame, write_frame
from srv.server.text.chat_template import ChatTemplate

MAX_COMPILED = 16  # templates of requests


class TemplateSetup(msgspec.Struct):
    """The first frame: what `ChatTemplate` is made of, and the limits: processor time per frame in seconds, and bytes
    of memory beyond what the process has at its start."""

    sources: dict[str, str]
    special_tokens: dict[str, str]
    origin: str
    processor_seconds: float
    memory_bytes: int


class TemplateConversation(msgspec.Struct):
    """What one call of `ChatTemplate.render` gets."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    variables: dict[str, Any]
    source: str | None = None  # of the template that came with the request, instead of the model's


class TemplateReply(msgspec.Struct):
    """The text, or why there is none. `code` and `param` are those of a RequestError."""

    text: str | None = None
    refused: str = ""
    code: str = ""
    param: str | None = None


def main() -> int:
    ignore_signals()
    source, sink = channels()
    if not (content := read_frame(source)):
        return 0
    setup = msgspec.json.decode(content, type=TemplateSetup)
    limit_memory(setup.memory_bytes)
    limit_time(setup.processor_seconds)
    try:
        template = ChatTemplate(setup.sources, setup.special_tokens, setup.origin)
    except ModelError as error:
        write_frame(sink, msgspec.json.encode(TemplateReply(refused=error.reason)))
        return 0
    write_frame(sink, msgspec.json.encode(TemplateReply(text="")))
    compiled = _Compiled(setup.special_tokens)
    while True:
        limit_time(0)
        if not (content := read_frame(source)):
            return 0
        limit_time(setup.processor_seconds)
        write_frame(sink, msgspec.json.encode(_render(template, compiled, content)))


class _Compiled:
    """The templates of the latest requests that came with one."""

    def __init__(self, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._templates: OrderedDict[str, ChatTemplate] = OrderedDict()

    def get(self, source: str) -> ChatTemplate:
        """Raises RequestError for a template that is not valid Jinja."""
        if source not in self._templates:
            self._templates[source] = ChatTemplate.of_request(source, self._special_tokens)
        self._templates.move_to_end(source)
        if len(self._templates) > MAX_COMPILED:
            self._templates.popitem(last=False)
        return self._templates[source]


def _render(template: ChatTemplate, compiled: _Compiled, content: bytes) -> TemplateReply:
    conversation = msgspec.json.decode(content, type=TemplateConversation)
    try:
        template = template if conversation.source is None else compiled.get(conversation.source)
        text = template.render(
            conversation.messages,
            add_generation_prompt=conversation.add_generation_prompt,
            extra=conversation.variables,
        )
    except RequestError as error:
        return TemplateReply(refused=error.message, code=error.code, param=error.param)
    return TemplateReply(text=text)


if __name__ == "__main__":
    sys.exit(main())

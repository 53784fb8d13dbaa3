"""Chat templates rendered in a process of their own, which may not use much time or memory.

A template comes with a model and is not trusted, and no sandbox in this process could stop `10 ** 10 ** 8` or a string
of gigabytes. Must not know Jinja, tokens or HTTP; `srv.io.bounded_process` owns the process.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from srv.errors import ModelError, RequestError
from srv.io.bounded_process import BoundedProcess, Lost, WorkLimits
from srv.server.text.template_child import TemplateConversation, TemplateReply, TemplateSetup

_MODULE = "srv.server.text.template_child"
DEFAULT_LIMITS = WorkLimits()


class TemplateProcess:
    """The chat templates of one model. Thread-safe; renders one conversation at a time, in about 0.2 ms.

    Raises ModelError (bad_chat_template) for a template that cannot be compiled within the limits. Its arguments are
    those of `ChatTemplate`. `starts`: at once, not at the first conversation.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        origin: str,
        limits: WorkLimits = DEFAULT_LIMITS,
        *,
        starts: bool = True,
    ) -> None:
        self._origin = origin
        setup = TemplateSetup(
            dict(sources), dict(special_tokens), origin, limits.processor_seconds, limits.memory_bytes
        )
        self._process = BoundedProcess(_MODULE, msgspec.json.encode(setup), limits, "renders it", _refusal)
        if not starts:
            return
        try:
            self._process.start()
        except Lost as lost:
            remedy = "Give a valid template with --chat-template FILE"
            raise ModelError("bad_chat_template", self._origin, str(lost), remedy) from None

    def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
        source: str | None = None,
    ) -> str:
        """The prompt text; see `ChatTemplate.render`. `source`: of a template to use instead of the model's.

        Raises RequestError, also if the template exceeds a limit.
        """
        content = msgspec.json.encode(TemplateConversation(messages, add_generation_prompt, dict(extra), source))
        try:
            reply = msgspec.json.decode(self._process.ask(content), type=TemplateReply)
        except Lost as lost:
            message = f"the chat template of {self._origin}: {lost}"
            if lost.retry:
                raise RequestError(f"{message}; retry later", code="chat_template_busy", status=503) from None
            raise RequestError(message, code="chat_template_error", param="messages") from None
        if reply.text is None:
            raise RequestError(reply.refused, code=reply.code, param=reply.param)
        return reply.text

    def close(self) -> None:
        """End the process, also during a rendering, which then fails."""
        self._process.close()


def _refusal(reply: bytes) -> str:
    compiled = msgspec.json.decode(reply, type=TemplateReply)
    return compiled.refused if compiled.text is None else ""

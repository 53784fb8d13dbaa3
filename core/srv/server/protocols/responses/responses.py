"""`/v1/responses`: OpenAI's Responses API, with a bounded store of responses in memory.

Must not know how a prompt is rendered, a reply is generated or an event looks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.server.http.auth import owner_of
from srv.server.http.json_response import json_response
from srv.server.protocols.common.conversations import Conversation, count_tokens, shortened
from srv.server.protocols.common.endpoint import Asked, GeneratingEndpoint
from srv.server.protocols.common.replies import Event
from srv.server.protocols.common.reply_reader import ReplyReader, prepare
from srv.server.protocols.responses.fields import ENCRYPTED_REASONING, LOGPROBS, ResponsesBody
from srv.server.protocols.responses.format import ResponseFormatter, new_id
from srv.server.protocols.responses.input import Item, ReadTools, read_items, read_messages, read_tools
from srv.server.protocols.responses.store import ResponseStore, StoredResponse
from srv.server.request.fields import shorten
from srv.server.request.prompt_request import TokenizedPrompt
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service

TOO_LONG = ("context_length_exceeded", "request_too_large")
MAX_METADATA, MAX_LABEL_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512
_INCLUDED = (LOGPROBS, ENCRYPTED_REASONING)


class Responses(GeneratingEndpoint):
    """The endpoints, one method each; the object itself is `POST /v1/responses`."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.store = ResponseStore()

    async def ask(self, body: object, request: Request) -> Asked:
        fields = ResponsesBody.parse(body)
        self.service.preprocessor.check_model(fields.model)
        _check(fields)
        owner = owner_of(request)
        items, tools, conversation = self._read(fields, owner)
        prompt, reader = await self._prepare(fields, conversation, owner)
        response = f"resp_{uuid.uuid4().hex}"
        stored = fields.store is not False
        included = fields.include or ()
        formatter = ResponseFormatter(
            reader(),
            self.service.text,
            response,
            self._frame(fields, tools, prompt.sampling, stored, _text_format(body)),
            custom=tools.custom,
            encoded=ENCRYPTED_REASONING in included,
            logprobs=LOGPROBS in included,
            on_done=partial(self._keep, owner, items) if stored else None,
        )
        return Asked([prompt], [fields.own_id or response], bool(fields.stream), formatter)

    async def _prepare(
        self, fields: ResponsesBody, conversation: Conversation, owner: str
    ) -> tuple[TokenizedPrompt, Callable[[], ReplyReader]]:
        sampling = _sampling(fields)
        ask = partial(
            prepare,
            self.service,
            sampling=sampling,
            field_of=fields.spelled.__getitem__,
            namespace=fields.namespace,
            owner=owner,
        )
        try:
            return await ask(conversation)
        except RequestError as refused:
            if fields.truncation != "auto" or refused.code not in TOO_LONG:
                raise
        room = self.service.settings.request_token_limit - (sampling.max_tokens or 1)
        return await ask(await shortened(self.service.preprocessor, conversation, room))

    def _read(self, fields: ResponsesBody, owner: str) -> tuple[list[Item], ReadTools, Conversation]:
        """The items and tools of the whole conversation, and its form for the prompt. Raises RequestError."""
        earlier = self._earlier(owner, fields.previous_response_id)
        items = read_items(fields, earlier, partial(self.store.item, owner), new_id)
        tools = read_tools(fields)
        messages = read_messages(items, fields.instructions, len(earlier))
        return items, tools, Conversation(messages, tools.use, _variables(fields), "input")

    async def input_tokens(self, request: Request) -> Response:
        """The length of the prompt that a body would have."""
        fields = ResponsesBody.parse(await self.service.body(request))
        preprocessor = self.service.preprocessor
        preprocessor.check_model(fields.model)
        _, _, conversation = self._read(fields, owner_of(request))
        count = await count_tokens(preprocessor, conversation)
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    def _earlier(self, owner: str, name: str | None) -> Sequence[Item]:
        return () if name is None else self._stored(owner, name, "previous_response_id").conversation

    def _stored(self, owner: str, name: str, param: str | None) -> StoredResponse:
        stored = self.store.get(owner, name)
        if stored is None:
            raise RequestError(
                f"Response with id '{shorten(name)}' not found. Responses with store = false are not kept, and of the"
                " others the least recently used are dropped; send the whole conversation as input",
                code="previous_response_not_found" if param else "response_not_found",
                param=param,
                status=404,
            )
        return stored

    def _keep(self, owner: str, items: Sequence[Item], response: Event) -> None:
        self.store.put(owner, StoredResponse(response, items))

    def _frame(
        self, fields: ResponsesBody, tools: ReadTools, sampling: Sampling, stored: bool, shown: object
    ) -> Mapping[str, object]:
        """The fields of the response that the request determines. `shown`: the form of its text."""
        reasoning = fields.reasoning
        return {
            "model": self.service.settings.model_name,
            "background": False,
            "instructions": fields.instructions,
            "max_output_tokens": sampling.max_tokens,
            "max_tool_calls": fields.max_tool_calls,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": tools.use.parallel,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": fields.prompt_cache_key,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "safety_identifier": fields.safety_identifier,
            "service_tier": "default",
            "store": stored,
            "temperature": sampling.temperature,
            "text": {"format": shown},
            "tool_choice": fields.tool_choice if fields.tool_choice is not None else "auto",
            "tools": tools.shown,
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": fields.truncation or "disabled",
            "user": fields.user,
        }

    # ---- stored responses

    def _found(self, request: Request) -> StoredResponse:
        return self._stored(owner_of(request), request.path_params["response"], None)

    async def read(self, request: Request) -> Response:
        stored = self._found(request)
        if request.query_params.get("stream", "false").lower() in ("true", "1"):
            raise RequestError(
                "stream is refused: a stored response is complete; read it without stream",
                code="not_implemented",
                param="stream",
            )
        return json_response(stored.response)

    async def delete(self, request: Request) -> Response:
        name = self._found(request).response["id"]
        self.store.delete(owner_of(request), name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        items: list[Any] = list(self._found(request).items)
        ids = [item["id"] for item in items]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        return json_response({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False})

    async def cancel(self, request: Request) -> Response:
        self._found(request)
        raise RequestError(
            "only responses in the background can be cancelled, and these are not implemented; close the connection of"
            " a running response, or send its rid to /abort_request",
            code="not_implemented",
        )


def _check(fields: ResponsesBody) -> None:
    """The checks of fields that belong together. Raises RequestError."""
    for name in fields.include or ():
        if name not in _INCLUDED:
            raise RequestError(
                f'include = "{shorten(name)}" is not implemented; send {" or ".join(_INCLUDED)}',
                code="not_implemented",
                param="include",
            )
    if fields.top_logprobs and LOGPROBS not in (fields.include or ()):
        raise RequestError(
            f'top_logprobs is refused: it needs "{LOGPROBS}" in include; send both or neither',
            code="invalid_value",
            param="top_logprobs",
        )
    if fields.sampling().max_tokens == 0:
        raise RequestError(
            "max_output_tokens = 0 is refused: a response needs at least 1 token",
            code="invalid_value",
            param="max_output_tokens",
        )
    labels = fields.metadata or {}
    if len(labels) > MAX_METADATA or any(
        len(name) > MAX_LABEL_LENGTH or len(value) > MAX_VALUE_LENGTH for name, value in labels.items()
    ):
        raise RequestError(
            f"metadata must have at most {MAX_METADATA} entries, with names of at most {MAX_LABEL_LENGTH} and values"
            f" of at most {MAX_VALUE_LENGTH} characters",
            code="invalid_value",
            param="metadata",
        )


def _text_format(body: object) -> object:
    """The form of the text as the client wrote it."""
    text = body.get("text") if isinstance(body, dict) else None
    return (text or {}).get("format") or {"type": "text"}


def _variables(fields: ResponsesBody) -> Mapping[str, object]:
    effort = None if fields.reasoning is None else fields.reasoning.effort
    return {} if effort is None else {"reasoning_effort": effort}


def _sampling(fields: ResponsesBody) -> Sampling:
    sampling, grammar = fields.sampling(), None if fields.text is None else fields.text.format
    if grammar is not None:
        if sampling.grammar is not None:
            raise RequestError(
                f"{grammar.param} and {sampling.grammar.param} both constrain the output; send one of them",
                code="invalid_value",
                param=sampling.grammar.param,
            )
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    if LOGPROBS not in (fields.include or ()):
        return sampling
    return msgspec.structs.replace(sampling, logprobs=fields.top_logprobs or 0)

"""`/generate`, the native endpoint, with requests and responses like SGLang's.

Must not know how sequences are generated.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request

from srv.errors import RequestError
from srv.server.embedding import unpack_floats
from srv.server.generation import CompletedSequence, OutputDelta
from srv.server.generation import Sequence as OutputSequence
from srv.server.http.auth import owner_of
from srv.server.http.events import DONE, event
from srv.server.protocols.common.endpoint import Asked, Formatter, GeneratingEndpoint
from srv.server.protocols.common.logprobs import (
    NativeEntry,
    native_entry,
    native_listed_logprobs,
    native_logprobs,
    native_top_logprobs,
)
from srv.server.protocols.native.fields import DEFAULT_NEW_TOKENS, GenerateBody, NativeSampling
from srv.server.protocols.native.scores import check_positions, listed_ids, with_logprobs
from srv.server.protocols.native.values import boolean, integer_in, per_prompt, rid_value, salt_value
from srv.server.request.prompt_request import PromptRequest, TokenizedPrompt
from srv.server.request.prompts import Prompt, read_prompts
from srv.server.request.sampling_fields import MAX_TOP_LOGPROBS, Sampling, namespace_of
from srv.server.service import Service
from srv.server.text.token_ids import no_tokenizer
from srv.types import FinishReason

T = TypeVar("T")


def _prompts(body: GenerateBody) -> tuple[list[Prompt], bool, str]:
    """The prompts, whether they are a batch, and the name of their field."""
    prompt_fields = [name for name in ("text", "input_ids") if getattr(body, name) is not None]
    if len(prompt_fields) != 1:
        problem = "neither text nor input_ids is given" if not prompt_fields else "text and input_ids are both given"
        raise RequestError(f"{problem}; send one of them", code="invalid_value", param="text")
    param = prompt_fields[0]
    prompts, batch = read_prompts(getattr(body, param), param)
    expected = str if param == "text" else list
    if any(not isinstance(prompt, expected) for prompt in prompts):
        kind = "texts" if param == "text" else "token ids"
        raise RequestError(f"{param} must contain {kind}", code="invalid_type", param=param)
    return prompts, batch, param


def _sampling_params(value: object, param: str) -> Sampling:
    sampling = NativeSampling.parse({} if value is None else value, param).sampling()
    if sampling.grammar is None:
        return sampling
    grammar = msgspec.structs.replace(sampling.grammar, param=f"{param}.{sampling.grammar.param}")
    return msgspec.structs.replace(sampling, grammar=grammar)


def _spelled(parent: str, name: str) -> str:
    """The request's field for a field of `Sampling`."""
    return f"{parent}.{NativeSampling.spelled.get(name, name)}"


class _IncrementalArray:
    """The JSON encoding of a growing array, in which each item is encoded only once.

    segments: return only the items that are new since the last call.
    """

    def __init__(self, segments: bool = False) -> None:
        self._count, self._segments = 0, segments
        self._encoded = bytearray()

    def extend(self, items: Sequence[T], encode: Callable[[Sequence[T]], object]) -> msgspec.Raw:
        """Encode `items`, which start with those of the last call; `encode` returns a list with one entry per item."""
        if self._segments:
            self._encoded.clear()
        if len(items) > self._count:
            encoded = msgspec.json.encode(encode(items[self._count :]))
            self._encoded += (b"," if self._encoded else b"") + encoded[1:-1]
            self._count = len(items)
        return msgspec.Raw(b"[" + self._encoded + b"]")


@dataclass(slots=True)
class _EncodedOutput:
    """The encoded output of one sequence: streaming n tokens encodes n items instead of n squared."""

    tokens: _IncrementalArray
    logprobs: _IncrementalArray
    top: _IncrementalArray
    listed: _IncrementalArray
    hidden_states: _IncrementalArray
    parts_sent: int = 0
    prompt_sent: bool = False


class NativeFormatter(Formatter):
    """Formats the outputs of one request like SGLang.

    In a stream each event contains the whole output so far, with its log-probabilities and hidden states. The
    log-probabilities of the prompt do not change, and are only in the first and last event of a sequence. With
    `--stream-output` each event contains only what is new, and the log-probabilities of the prompt come once.
    """

    def __init__(self, service: Service, body: GenerateBody, rids: list[str], as_list: bool) -> None:
        self._service, self._rids, self._as_list = service, rids, as_list
        self._segments = bool(body.stream) and service.settings.stream_segments
        self._text = service.text if body.return_text_in_logprobs else None
        self._encoded: dict[int, _EncodedOutput] = {}

    def stream(self, delta: OutputDelta) -> bytes:
        result = self.results[delta.sequence.index]
        result.add(delta)
        shown = self._format(result)
        return event({**shown, "index": delta.sequence.index} if self._as_list else shown)

    def shown(self, delta: OutputDelta) -> OutputDelta | CompletedSequence:
        # The last event repeats the log-probabilities of the prompt.
        return delta if delta.finish is None else self.results[delta.sequence.index]

    def closing(self) -> bytes:
        return DONE

    def whole(self) -> object:
        shown = [self._format(result) for result in self.results]
        return shown if self._as_list else shown[0]

    def _format(self, result: CompletedSequence) -> dict[str, object]:
        """The output of a sequence so far; complete when `finish_reason` is set."""
        encoded = self._encoded.get(result.sequence.index)
        if encoded is None:
            tokens, logprobs, top, listed, states = (_IncrementalArray(self._segments) for _ in range(5))
            encoded = _EncodedOutput(tokens, logprobs, top, listed, states)
            self._encoded[result.sequence.index] = encoded
        sequence = result.sequence
        meta: dict[str, object] = {
            "id": self._rids[sequence.prompt_index],
            "finish_reason": self._reason(result),
            "prompt_tokens": len(sequence.prompt.tokens),
            "completion_tokens": sequence.completion_tokens,
            "e2e_latency": time.perf_counter() - sequence.arrival,
        }
        if sequence.structured_output_valid is False:
            meta["structured_output_valid"] = False
        if self._service.settings.cache_report:
            meta["cached_tokens"] = sequence.cached_tokens
        if sequence.prompt.params.logprobs is not None:
            meta |= self._logprobs(result, encoded)
        if sequence.prompt.params.hidden_states:
            meta["hidden_states"] = self._hidden_states(sequence, encoded)
        text = {"text": self._text_of(result, encoded)} if self._service.text.has_tokenizer else {}
        return {
            **text,
            "output_ids": encoded.tokens.extend(result.tokens, list),
            "meta_info": meta,
        }

    def _text_of(self, result: CompletedSequence, encoded: _EncodedOutput) -> str:
        if not self._segments:
            return result.text
        begin, encoded.parts_sent = encoded.parts_sent, len(result.parts)
        return "".join(result.parts[begin:])

    def _reason(self, result: CompletedSequence) -> dict[str, object] | None:
        sequence = result.sequence
        if sequence.finish is None:
            return None
        if sequence.finish is FinishReason.STOP:
            return {"type": "stop", "matched": sequence.matched}
        if sequence.finish is FinishReason.LENGTH:
            return {"type": "length", "length": sequence.completion_tokens}
        draining = self._service.lifecycle.draining
        return {"type": "abort", "message": "the server is shutting down" if draining else "the request was aborted"}

    def _logprobs(self, result: CompletedSequence, encoded: _EncodedOutput) -> dict[str, object]:
        params, text = result.sequence.prompt.params, self._text
        fields: dict[str, object] = {
            "output_token_logprobs": encoded.logprobs.extend(result.logprobs, partial(native_logprobs, text))
        }
        if params.logprobs:
            fields["output_top_logprobs"] = encoded.top.extend(result.logprobs, partial(native_top_logprobs, text))
        if params.logprob_token_ids:
            format_listed = partial(native_listed_logprobs, text, params.logprob_token_ids)
            fields["output_token_ids_logprobs"] = encoded.listed.extend(result.logprobs, format_listed)
        again = result.sequence.finish is not None and not self._segments
        if params.prompt_logprobs is not None and (again or not encoded.prompt_sent):
            encoded.prompt_sent = True
            fields |= self._prompt_logprobs(result)
        return fields

    def _prompt_logprobs(self, result: CompletedSequence) -> dict[str, object]:
        params, text, scores = result.sequence.prompt.params, self._text, result.prompt_logprobs or []
        first: list[NativeEntry] = []
        if params.prompt_logprobs_start == 0:  # the first token has no log-probability
            first = [native_entry(text, result.sequence.prompt.tokens[0], None)]
        fields: dict[str, object] = {"input_token_logprobs": [*first, *native_logprobs(text, scores)]}
        if params.prompt_logprobs:
            fields["input_top_logprobs"] = [*([None] * len(first)), *native_top_logprobs(text, scores)]
        if token_ids := params.logprob_token_ids:
            listed_logprobs = native_listed_logprobs(text, token_ids, scores)
            fields["input_token_ids_logprobs"] = [*([None] * len(first)), *listed_logprobs]
        return fields

    def _hidden_states(self, sequence: OutputSequence, encoded: _EncodedOutput) -> msgspec.Raw:
        """An array of the prompt's vectors, then one vector per output token except the last, which is not computed."""
        states, size, prompt = sequence.hidden_states, 4 * self._service.settings.hidden_size, sequence.prompt.tokens

        def vector(position: int) -> list[float]:
            return unpack_floats(states[position * size : (position + 1) * size])

        def entry(index: int) -> object:
            if index > 0:
                return vector(len(prompt) + index - 1)
            return [vector(position) for position in range(min(len(prompt), len(states) // size))]

        entries = range(max(1, sequence.completion_tokens))
        return encoded.hidden_states.extend(entries, lambda indices: [entry(index) for index in indices])


class NativeGenerate(GeneratingEndpoint):
    """Serves `/generate`. A batch is one client request, which is aborted or fails as a whole."""

    finishes_aborted = True

    async def ask(self, body: object, request: Request) -> Asked:
        fields = GenerateBody.parse(body)
        prompts, batch, param = _prompts(fields)
        name, rids = self._rids(fields, len(prompts), batch)
        tokenized = await self._tokenize(fields, prompts, batch, param, owner_of(request))
        as_list = batch or any(len(prompt.seeds) > 1 for prompt in tokenized)
        formatter = NativeFormatter(self.service, fields, rids, as_list)
        return Asked(tokenized, rids, bool(fields.stream), formatter, name)

    def check_whole(self, finishes: Sequence[FinishReason]) -> None:
        """A shutdown is a finish reason here."""

    def _rids(self, body: GenerateBody, count: int, batch: bool) -> tuple[str | None, list[str]]:
        """The id of the batch, if it has one of its own, and one id per prompt."""
        rids = per_prompt(body.rid, count, batch, "rid", rid_value)
        if batch and isinstance(body.rid, str):
            return body.rid, [f"{body.rid}-{index}" for index in range(count)]
        return None, [rid or uuid.uuid4().hex for rid in rids]

    async def _tokenize(
        self, body: GenerateBody, prompts: list[Prompt], batch: bool, param: str, owner: str
    ) -> list[TokenizedPrompt]:
        count = len(prompts)
        params = per_prompt(body.sampling_params, count, batch, "sampling_params", _sampling_params)
        requested = per_prompt(body.return_logprob, count, batch, "return_logprob", boolean)
        starts = per_prompt(
            body.logprob_start_len,
            count,
            batch,
            "logprob_start_len",
            integer_in(-1, -1, self.service.settings.request_token_limit),
        )
        top_counts = per_prompt(
            body.top_logprobs_num, count, batch, "top_logprobs_num", integer_in(0, 0, MAX_TOP_LOGPROBS)
        )
        hidden_states = per_prompt(body.return_hidden_states, count, batch, "return_hidden_states", boolean)
        salts = per_prompt(body.cache_salt, count, batch, "cache_salt", salt_value)
        keys = per_prompt(body.extra_key, count, batch, "extra_key", salt_value)
        listed_tokens = listed_ids(body.token_ids_logprob, count, batch)
        for ids in {id(ids): ids for ids in listed_tokens}.values():
            self.service.preprocessor.check_tokens(ids, "token_ids_logprob")
        self._check_hidden_states(hidden_states)
        if body.return_text_in_logprobs and not self.service.text.has_tokenizer:
            raise no_tokenizer("return_text_in_logprobs")
        self.service.preprocessor.check_count(1, sum(sampling_params.n for sampling_params in params), param)
        requests = []
        for index, prompt in enumerate(prompts):
            sampling = with_logprobs(
                params[index], requested[index], starts[index], top_counts[index], listed_tokens[index]
            )
            sampling = msgspec.structs.replace(
                sampling, hidden_states=hidden_states[index], custom_processor=body.custom_logit_processor or ""
            )
            parent = f"sampling_params[{index}]" if isinstance(body.sampling_params, list) else "sampling_params"
            name = f"{param}[{index}]" if batch else param
            namespace = namespace_of(salts[index], keys[index])
            spelled = partial(_spelled, parent)
            requests.append(PromptRequest(prompt, sampling, name, spelled, namespace=namespace, owner=owner))
        tokenized = await self.service.preprocessor.prepare_all(requests, default_max_tokens=DEFAULT_NEW_TOKENS)
        check_positions(starts, tokenized)
        return tokenized

    def _check_hidden_states(self, requested: Sequence[bool]) -> None:
        if any(requested) and not self.service.settings.return_hidden_states:
            raise RequestError(
                "return_hidden_states is refused: this server does not return hidden states; start it with"
                " --enable-return-hidden-states",
                code="hidden_states_disabled",
                param="return_hidden_states",
            )

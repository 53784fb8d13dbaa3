"""Turns pairs of texts, or texts, into scores, in the way that the served model allows.

    a classification head with one label      the pair as one prompt          its logit, activated
    a template for answers                    the template's prompt           P(yes) of the tokens yes and no
    neither                                   both texts, each a prompt       the cosine of their embeddings

Owns the choice and the arithmetic. Must not know HTTP or the format of any protocol.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from srv.errors import RequestError
from srv.server.embedding import Embedding
from srv.server.http.access import NOBODY, Caller
from srv.server.request.fields import shorten
from srv.server.service import Service
from srv.server.text.encoded_template import EncodedTemplate
from srv.server.text.processor import EncodedPair
from srv.server.text.truncation import around_text
from srv.types import PooledHead, PooledOutput, Pooling, PoolingParams


class TextPair(NamedTuple):
    """`params`: the fields of the request with the two texts."""

    first: str
    second: str
    params: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """What the pairs of one client request share. `activate`: turn logits into scores, as the model says.

    `keep`: `truncate_prompt_tokens`. `instruction`: what a template asks for; None: what it says.
    """

    rid: str
    arrival: float
    caller: Caller = NOBODY
    namespace: str = ""
    activate: bool = True
    keep: int | None = None
    instruction: str | None = None


class PairScores(NamedTuple):
    """One score per pair, and what was computed for them."""

    values: list[float]
    computed: list[Embedding]


class Scorer:
    """The scores of one server."""

    def __init__(self, service: Service) -> None:
        self._service, self._settings = service, service.settings

    def pooling(self) -> Pooling:
        """How prompts are pooled. Raises RequestError if the server pools none."""
        if self._settings.pooling is None:
            raise RequestError(
                "this server computes nothing from pooled hidden states; start the server with --is-embedding",
                code="embeddings_disabled",
            )
        return self._settings.pooling

    async def pairs(self, pairs: Sequence[TextPair], score_request: ScoreRequest) -> PairScores:
        """The scores of pairs of texts. Raises RequestError, EngineDead."""
        pooling = self.pooling()
        template, labels = self._settings.score_template, self._settings.head.labels
        if score_request.instruction is not None and template is None:
            raise RequestError(
                "instruction is refused: only models that are asked by a template read it (--score-template)",
                code="not_supported",
                param="instruction",
            )
        if template is not None:
            return await self._answers(pairs, score_request, template)
        if len(labels) > 1:
            raise RequestError(
                f"{self._settings.model_name} cannot score pairs: its classification head has {len(labels)} labels, and"
                " a score needs one; use /classify",
                code="not_a_scorer",
            )
        return await (
            self._labelled(pairs, score_request, pooling) if labels else self._cosines(pairs, score_request, pooling)
        )

    async def _labelled(self, pairs: Sequence[TextPair], score_request: ScoreRequest, pooling: Pooling) -> PairScores:
        encoded = await self._encode_pairs(pairs, score_request.keep)
        params = [
            PoolingParams(pooling=pooling, output=PooledOutput.LABELS, types_from=pair.types_from) for pair in encoded
        ]
        computed = await self._run([pair.tokens for pair in encoded], params, score_request)
        values = [activated(embedding.elements(), self._activation(score_request))[0] for embedding in computed]
        return PairScores(values, computed)

    async def _answers(
        self, pairs: Sequence[TextPair], score_request: ScoreRequest, encoded: EncodedTemplate
    ) -> PairScores:
        preprocessor, fields = self._service.preprocessor, [pair.params[1] for pair in pairs]
        bodies = [encoded.template.filled(pair.first, pair.second, score_request.instruction) for pair in pairs]
        keep = preprocessor.kept(score_request.keep, 0)
        await preprocessor.refuse_early(bodies, fields, 0, keep)
        tokens = await preprocessor.encode(bodies, False, "text_2")
        prompts = [around_text(encoded.prefix, body, encoded.suffix, keep) for body in tokens]
        for prompt, field in zip(prompts, fields, strict=True):
            preprocessor.check_prompt_length(len(prompt), field, 0)
        params = PoolingParams(pooling=Pooling.LAST, output=PooledOutput.TOKENS, tokens=encoded.answers)
        computed = await self._run(prompts, [params] * len(prompts), score_request)
        differences = [yes - no for yes, no in (embedding.elements() for embedding in computed)]
        return PairScores(
            [sigmoid(difference) if score_request.activate else difference for difference in differences], computed
        )

    async def _cosines(self, pairs: Sequence[TextPair], score_request: ScoreRequest, pooling: Pooling) -> PairScores:
        """Each distinct text is computed once."""
        if not score_request.activate:
            raise RequestError(
                f"use_activation = false is refused: scores of {self._settings.model_name} are cosines of embeddings,"
                " which no activation follows",
                code="not_supported",
                param="use_activation",
            )
        distinct: dict[str, str] = {}
        for pair in pairs:
            distinct.setdefault(pair.first, pair.params[0])
            distinct.setdefault(pair.second, pair.params[1])
        preprocessor, prompt = self._service.preprocessor, preceding_prompt(self._settings.head, pooling)
        prompts = await preprocessor.tokenize(
            [prompt + text for text in distinct],
            list(distinct.values()),
            special=True,
            min_output=0,
            keep=preprocessor.kept(score_request.keep, 0),
        )
        computed = await self._run(prompts, [PoolingParams(pooling=pooling)] * len(prompts), score_request)
        vectors = {text: embedding.elements() for text, embedding in zip(distinct, computed, strict=True)}
        values = [_dot(vectors[pair.first], vectors[pair.second]) for pair in pairs]
        return PairScores(values, computed)

    async def _encode_pairs(self, pairs: Sequence[TextPair], truncate: int | None) -> list[EncodedPair]:
        preprocessor = self._service.preprocessor
        for pair in pairs:
            for text, param in zip(pair[:2], pair.params, strict=True):
                preprocessor.check_bytes(text, param)
        keep = preprocessor.kept(truncate, 0)
        texts = [(pair.first, pair.second) for pair in pairs]
        encoded = await preprocessor.in_parts(
            [len(first) + len(second) for first, second in texts],
            lambda part: self._service.text.encode_pairs([texts[index] for index in part], keep),
        )
        for pair, tokenized in zip(pairs, encoded, strict=True):
            preprocessor.check_prompt_length(len(tokenized.tokens), pair.params[1], 0)
        return encoded

    async def _run(
        self, prompts: list[list[int]], params: Sequence[PoolingParams], score_request: ScoreRequest
    ) -> list[Embedding]:
        return await self._service.embed(
            prompts, params, score_request.rid, score_request.arrival, score_request.caller, score_request.namespace
        )

    def _activation(self, score_request: ScoreRequest) -> str:
        return self._settings.head.activation if score_request.activate else "identity"

    async def classify(self, prompts: list[list[int]], score_request: ScoreRequest) -> PairScores:
        """The scores of all labels of each prompt, concatenated. Raises RequestError if the model has no labels."""
        pooling = self.pooling()
        if not self._settings.head.labels:
            raise RequestError(
                f"{self._settings.model_name} has no classification head; serve a *ForSequenceClassification model",
                code="not_a_classifier",
            )
        params = PoolingParams(pooling=pooling, output=PooledOutput.LABELS)
        computed = await self._run(prompts, [params] * len(prompts), score_request)
        values = [
            value
            for embedding in computed
            for value in activated(embedding.elements(), self._activation(score_request))
        ]
        return PairScores(values, computed)


def preceding_prompt(head: PooledHead, pooling: Pooling, name: str | None = None) -> str:
    """The text that precedes inputs: the model's prompt of this name, or its default one; "" if there is none.

    Raises RequestError for an unknown name, and for a prompt whose tokens pooling would have to leave out.
    """
    prompts, param = dict(head.prompts), None if name is None else "prompt_name"
    if name is not None and name not in prompts:
        choices = f"its prompts are {', '.join(prompts)}" if prompts else "the model's files name none"
        raise RequestError(f"prompt_name = {shorten(name)} is refused: {choices}", code="invalid_value", param=param)
    prompt = prompts.get(name or head.default_prompt or "", "")
    if prompt and not head.prompt_pooled and not pooling.one_token:
        which = f"prompt_name = {name}" if name else f"text with the model's default prompt {head.default_prompt}"
        raise RequestError(
            f"{which} is refused: the model leaves a prompt's tokens out of {pooling.value} pooling (include_prompt),"
            " which this server does not",
            code="not_supported",
            param=param,
        )
    return prompt


def activated(logits: Sequence[float], activation: str) -> list[float]:
    """PairScores of logits; `activation`: "sigmoid", "softmax" or "identity"."""
    if activation == "identity":
        return list(logits)
    if activation == "sigmoid":
        return [sigmoid(logit) for logit in logits]
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))

"""`/rerank`, `/score` and `/classify`. Must not know how scores are computed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from srv.errors import RequestError
from srv.server.embedding import Embedding
from srv.server.http.auth import caller_of
from srv.server.http.events import while_connected
from srv.server.http.json_response import json_response
from srv.server.protocols.pooled.fields import ClassifyBody, PooledBody, RerankBody, ScoreBody
from srv.server.protocols.pooled.label_scores import label_scores, read_items
from srv.server.protocols.pooled.scoring import Scorer, ScoreRequest, TextPair
from srv.server.request.prompts import read_prompts
from srv.server.request.sampling_fields import namespace_of
from srv.server.service import Service


class PooledEndpoint:
    """What these endpoints share. The prompts of a body are one client request, which fails as a whole."""

    kind: str

    def __init__(self, service: Service) -> None:
        self.service, self.scorer = service, Scorer(service)

    def begin(
        self, request: Request, fields: PooledBody, arrival: float, instruction: str | None = None
    ) -> ScoreRequest:
        """Check what the bodies share. Raises RequestError."""
        self.service.preprocessor.check_model(fields.model)
        return ScoreRequest(
            rid=fields.own_id or f"{self.kind}-{uuid.uuid4().hex}",
            arrival=arrival,
            caller=caller_of(request),
            namespace=namespace_of(fields.cache_salt, fields.extra_key),
            activate=fields.activates,
            keep=fields.truncate_prompt_tokens,
            instruction=instruction,
        )

    def response(self, score_request: ScoreRequest, computed: Sequence[Embedding], **fields: object) -> Response:
        content = {
            "id": score_request.rid,
            **fields,
            "model": self.service.settings.model_name,
            "usage": usage_of(computed, self.service.settings.cache_report),
        }
        return json_response(content)


class Rerank(PooledEndpoint):
    """Documents in the order of their scores, as in the APIs of Jina and Cohere."""

    kind = "rerank"

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        fields = RerankBody.parse(await self.service.body(request))
        score_request = self.begin(request, fields, arrival, fields.instruction)
        self.service.preprocessor.check_count(len(fields.documents), 1, "documents")
        pairs = [
            TextPair(fields.query, document, ("query", f"documents[{index}]"))
            for index, document in enumerate(fields.documents)
        ]
        scores = await while_connected(request.receive, self.scorer.pairs(pairs, score_request))
        best = sorted(range(len(pairs)), key=lambda index: -scores.values[index])  # equal ones stay in order
        results: list[dict[str, object]] = []
        for index in best[: fields.top_n or None]:
            document = {} if fields.return_documents is False else {"document": {"text": pairs[index].second}}
            results.append({"index": index, **document, "relevance_score": scores.values[index]})
        return self.response(score_request, scores.computed, results=results)


class Score(PooledEndpoint):
    """The scores of pairs of texts (vLLM)."""

    kind = "score"

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        fields = ScoreBody.parse(await self.service.body(request))
        score_request = self.begin(request, fields, arrival, fields.instruction)
        if not (fields.text_1 or fields.text_2) and (fields.query is not None or fields.items is not None):
            return await self._of_items(request, fields, score_request)
        for name, text in (("text_1", fields.text_1), ("text_2", fields.text_2)):
            if not text:
                raise RequestError(f"{name} is required", code="missing_field", param=name)
        other_form = ("query", "items", "label_token_ids", "apply_softmax", "item_first")
        _refuse_beside(fields, other_form, "it belongs to SGLang's form with query and items, not to text_1 and text_2")
        pairs = _pairs(fields.text_1, fields.text_2)
        self.service.preprocessor.check_count(len(pairs), 1, "text_2")
        scores = await while_connected(request.receive, self.scorer.pairs(pairs, score_request))
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores.values)]
        return self.response(score_request, scores.computed, object="list", created=int(time.time()), data=data)

    async def _of_items(self, request: Request, fields: ScoreBody, score_request: ScoreRequest) -> Response:
        """SGLang's form: of the labels after each item, or as above if there are none."""
        usage: dict[str, object]
        if fields.label_token_ids:
            answer_fields = ("instruction", "use_activation", "activation")
            _refuse_beside(
                fields, answer_fields, "scores of label_token_ids are probabilities after the texts as they are"
            )
            scores, usage = await label_scores(self.service, request, fields, score_request.rid, score_request.arrival)
        else:
            _refuse_beside(fields, ("apply_softmax", "item_first"), "it needs label_token_ids")
            query, items = read_items(fields)
            if not isinstance(query, str):
                raise RequestError(
                    "query must be a text, as label_token_ids are missing; send them, or texts",
                    code="invalid_type",
                    param="query",
                )
            pairs = [TextPair(query, str(item), ("query", f"items[{index}]")) for index, item in enumerate(items)]
            self.service.preprocessor.check_count(len(pairs), 1, "items")
            computed = await while_connected(request.receive, self.scorer.pairs(pairs, score_request))
            scores = [[value] for value in computed.values]
            usage = usage_of(computed.computed, self.service.settings.cache_report)
        shown = {"id": score_request.rid, "object": "scoring", "created": int(time.time()), "scores": scores}
        return json_response({**shown, "model": self.service.settings.model_name, "usage": usage})


def _refuse_beside(fields: ScoreBody, names: Sequence[str], why: str) -> None:
    """Raises RequestError for the first of these fields that is set."""
    for name in names:
        if getattr(fields, name) not in (None, [], ()):
            raise RequestError(f"{name} is refused: {why}; remove it", code="invalid_value", param=name)


def _pairs(firsts: Sequence[str], seconds: Sequence[str]) -> list[TextPair]:
    """One text is compared with all others; several are compared with as many, one by one."""
    if len(firsts) > 1 and len(firsts) != len(seconds):
        raise RequestError(
            f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}: text_1 must have one, or as many as text_2",
            code="invalid_value",
            param="text_1",
        )
    names = ["text_1"] * len(seconds) if len(firsts) == 1 else [f"text_1[{index}]" for index in range(len(firsts))]
    return [
        TextPair(firsts[0] if len(firsts) == 1 else firsts[index], second, (names[index], f"text_2[{index}]"))
        for index, second in enumerate(seconds)
    ]


class Classify(PooledEndpoint):
    """The most likely label of each prompt, and the scores of all labels (vLLM)."""

    kind = "classify"

    async def __call__(self, request: Request) -> Response:
        arrival = time.perf_counter()
        self.service.lifecycle.check_accepting()
        fields = ClassifyBody.parse(await self.service.body(request))
        score_request = self.begin(request, fields, arrival)
        self.scorer.pooling()
        preprocessor, labels = self.service.preprocessor, self.service.settings.head.labels
        prompts, batch = read_prompts(fields.input, "input")
        preprocessor.check_count(len(prompts), 1, "input")
        tokenized = await preprocessor.tokenize(
            prompts,
            [f"input[{index}]" if batch else "input" for index in range(len(prompts))],
            special=fields.add_special_tokens is not False,
            min_output=0,
            keep=preprocessor.kept(score_request.keep, 0),
        )
        scores = await while_connected(request.receive, self.scorer.classify(tokenized, score_request))
        data = [
            _labelled(index, labels, scores.values[index * len(labels) : (index + 1) * len(labels)])
            for index in range(len(prompts))
        ]
        return self.response(score_request, scores.computed, object="list", created=int(time.time()), data=data)


def _labelled(index: int, labels: Sequence[str], probabilities: Sequence[float]) -> dict[str, object]:
    best = max(range(len(labels)), key=lambda label: probabilities[label])
    return {"index": index, "label": labels[best], "probs": list(probabilities), "num_classes": len(labels)}


def usage_of(computed: Sequence[Embedding], cache_report: bool) -> dict[str, object]:
    """The `usage` of a response without output tokens."""
    prompt_tokens = sum(embedding.prompt_tokens for embedding in computed)
    cached = sum(embedding.cached_tokens for embedding in computed)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        **({"prompt_tokens_details": {"cached_tokens": cached}} if cache_report else {}),
    }

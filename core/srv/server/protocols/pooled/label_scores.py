"""`/score` in SGLang's form: how likely each of some tokens is after a query and an item.

Must not know how probabilities are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.requests import Request

from srv.errors import RequestError
from srv.server.generation import CompletedSequence
from srv.server.http.auth import caller_of
from srv.server.http.events import while_connected
from srv.server.protocols.pooled.fields import ScoreBody
from srv.server.protocols.pooled.scoring import activated
from srv.server.request.prompt_request import PromptRequest
from srv.server.request.prompts import Prompt, read_prompts
from srv.server.request.sampling_fields import Sampling, namespace_of
from srv.server.service import Service


def read_items(fields: ScoreBody) -> tuple[Prompt, list[Prompt]]:
    """The query and the items, all of them texts or all of them token ids. Raises RequestError."""
    for name in ("query", "items"):
        if getattr(fields, name) is None:
            raise RequestError(f"{name} is required beside the other", code="missing_field", param=name)
    (query, *more), _ = read_prompts(fields.query, "query")
    if more:
        raise RequestError("query must be one text, or the token ids of one", code="invalid_type", param="query")
    items, _ = read_prompts(fields.items, "items")
    if any(type(item) is not type(query) for item in items):
        raise RequestError("items must be texts if query is one, else token ids", code="invalid_type", param="items")
    return query, items


async def label_scores(
    service: Service, request: Request, fields: ScoreBody, rid: str, arrival: float
) -> tuple[list[list[float]], dict[str, object]]:
    """The scores of the labels for each item, and the usage. Raises RequestError, EngineDead."""
    preprocessor, labels = service.preprocessor, fields.label_token_ids
    query, items = read_items(fields)
    preprocessor.check_count(len(items), 1, "items")
    preprocessor.check_tokens(labels, "label_token_ids")
    sampling = Sampling(max_tokens=1, ignore_eos=True, seed=0, logprobs=0, logprob_token_ids=labels)
    keep, namespace = fields.truncate_prompt_tokens, namespace_of(fields.cache_salt, fields.extra_key)
    pairs = [(item, query) if fields.item_first else (query, item) for item in items]
    prompts = await preprocessor.prepare_all(
        [
            PromptRequest(first + second, sampling, f"items[{index}]", namespace=namespace)  # type: ignore[operator]
            for index, (first, second) in enumerate(pairs)
        ],
        default_max_tokens=1,
        keep=preprocessor.kept(keep, 1),
    )
    ticket, group = service.start(prompts, [rid], arrival, caller=caller_of(request))
    try:
        results = await while_connected(request.receive, group.gather())
    finally:
        ticket.close()
    service.lifecycle.check_complete([result.finish for result in results])
    return [_scores(result, bool(fields.apply_softmax)) for result in results], group.usage().openai()


def _scores(result: CompletedSequence, softmax: bool) -> list[float]:
    """`softmax`: over the labels alone; else the probabilities among all tokens."""
    logprobs: Sequence[float] = result.logprobs[0].listed
    return activated(logprobs, "softmax") if softmax else [math.exp(logprob) for logprob in logprobs]

"""Budgets of reasoning: how the model begins and ends its reasoning. Must not know bodies."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from srv.errors import RequestError
from srv.reply.formats import ReplyFormat
from srv.reply.parser import ParserOptions
from srv.server.request.sampling_fields import Sampling
from srv.server.service import Service
from srv.types import ThinkingBudget


class AskedBudget(NamedTuple):
    """Tokens of reasoning, and the field that asks for them. `needs_format`: the request is refused if the format of
    the model's reasoning is not known; otherwise there is no reasoning that could be limited."""

    tokens: int
    field: str
    needs_format: bool = True


class _Marks(NamedTuple):
    """`end`: the one that is forced."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    end: str
    inside: bool
    anywhere: bool


async def with_budget(
    sampling: Sampling, limit: AskedBudget, options: ParserOptions, prompt: str, service: Service
) -> Sampling:
    """The parameters with a limit on the reasoning. Raises RequestError if its end cannot be forced."""
    marks = _marks(service.settings.reply_format, options, prompt)
    if marks is None and not limit.needs_format:
        return sampling
    if marks is None:
        raise RequestError(
            f"{limit.field} is refused: the format of this model's reasoning is not known;"
            " start the server with --reasoning-parser NAME, or remove it",
            code="not_implemented",
            param=limit.field,
        )
    await service.preprocessor.send_vocabulary(limit.field)
    end = tuple(service.text.encode(marks.end, False))
    lacking = [token for token in end if sampling.allowed_token_ids and token not in sampling.allowed_token_ids]
    if lacking:
        raise RequestError(
            f"{limit.field} is refused: allowed_token_ids lacks the token {lacking[0]} of {marks.end}, which ends the"
            " reasoning; send one of them",
            code="not_implemented",
            param=limit.field,
        )
    budget = ThinkingBudget(
        tokens=limit.tokens,
        end=end,
        begins=marks.begins,
        ends=marks.ends,
        inside=marks.inside,
        anywhere=marks.anywhere,
    )
    return msgspec.structs.replace(sampling, thinking=budget)


def _marks(replies: ReplyFormat, options: ParserOptions, prompt: str) -> _Marks | None:
    """None if the format is not known."""
    if (channels := replies.channels) is not None:
        begins = tuple(f"{channels.channel}{name}{channels.message}" for name in channels.reasoning)
        return _Marks(begins, channels.ends, channels.ends[0], inside=False, anywhere=True)
    if (row := replies.reasoning) is None:
        return None
    calls = row.ends_before if options.use.active else ()
    inside = row.starts_inside(prompt, options.continued)
    return _Marks(row.marks.begin, (*row.marks.end, *calls), row.marks.end[0], inside, row.anywhere)

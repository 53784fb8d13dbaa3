"""A score template in tokens: encoded once, when the server starts. Must not know requests."""

from __future__ import annotations

from typing import NamedTuple

from srv.errors import ModelError
from srv.models.score_template import SCORE_TEMPLATES, ScoreTemplate
from srv.server.text.processor import TextProcessor
from srv.types import PooledHead


class EncodedTemplate(NamedTuple):
    """`prefix`, `suffix`: the tokens around each body. `answers`: those of yes and no."""

    template: ScoreTemplate
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    answers: tuple[int, ...]


def encoded_template(template: ScoreTemplate, head: PooledHead, text: TextProcessor) -> EncodedTemplate:
    """Raises ModelError as `answer_tokens` does."""
    prefix, suffix = (tuple(text.encode(part, False)) for part in (template.prefix, template.suffix))
    return EncodedTemplate(template, prefix, suffix, answer_tokens(template, head, text))


def answer_tokens(template: ScoreTemplate, head: PooledHead, text: TextProcessor) -> tuple[int, ...]:
    """The tokens of yes and no. A checkpoint may name them, for the template that it was trained with.

    Raises ModelError if an answer is not one token.
    """
    if head.yes_no and template in SCORE_TEMPLATES.values():
        return head.yes_no
    encoded = [text.encode(answer, False) for answer in (template.yes, template.no)]
    if any(len(tokens) != 1 for tokens in encoded):
        raise ModelError(
            "bad_score_template",
            f"{template.yes!r} and {template.no!r}",
            "these answers of --score-template are not single tokens of the tokenizer",
            "Choose answers that are, or another template",
        )
    return tuple(tokens[0] for tokens in encoded)

"""How a model that generates text is asked whether a document answers a query: by the tokens for "yes" and "no".

    prefix + body + suffix          the model would answer yes or no; each part is encoded by itself, as on the cards

Owns the templates. Source: the model cards. Must not know requests, tokenizers, or how the answers become scores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from srv.errors import ModelError


@dataclass(frozen=True, slots=True)
class ScoreTemplate:
    """`body` has {instruction}, {query} and {document} in it. `instruction`: that of requests without one.

    `yes`, `no`: the texts of the answers, each a single token.
    """

    prefix: str
    body: str
    suffix: str
    instruction: str
    yes: str = "yes"
    no: str = "no"

    def filled(self, query: str, document: str, instruction: str | None) -> str:
        """The body for a query and a document."""
        given = {"instruction": instruction or self.instruction, "query": query, "document": document}
        return _filled(self.body, given)


def _filled(body: str, given: dict[str, str]) -> str:
    """The body with all fields in place. What a field holds is not searched for fields again."""
    parts: list[str] = []
    rest = body
    while rest:
        found = [(rest.find(f"{{{name}}}"), name) for name in given]
        at, name = min(((at, name) for at, name in found if at >= 0), default=(-1, ""))
        if at < 0:
            break
        parts += [rest[:at], given[name]]
        rest = rest[at + len(name) + 2 :]
    return "".join([*parts, rest])


SCORE_TEMPLATES = {
    "qwen3_reranker": ScoreTemplate(
        prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
        ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    )
}
_NAMES = tuple(field.name for field in fields(ScoreTemplate))
_NEEDED = ("{query}", "{document}")


@cache  # a plan, the start and the settings of one process need it
def read_score_template(value: str) -> ScoreTemplate:
    """The value of --score-template: a name of `SCORE_TEMPLATES`, or a JSON file with the fields of `ScoreTemplate`.

    Raises ModelError with code not_found or bad_score_template.
    """
    if value in SCORE_TEMPLATES:
        return SCORE_TEMPLATES[value]
    remedy = f"Give a JSON file with the texts {', '.join(_NAMES)}, or one of: {', '.join(SCORE_TEMPLATES)}"
    try:
        given = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"it is no name of a score template, and no file that can be read ({error})"
        raise ModelError("not_found", value, reason, remedy) from error
    except (ValueError, RecursionError) as error:
        reason = f"the file of --score-template is not JSON ({error})"
        raise ModelError("bad_score_template", value, reason, remedy) from error
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise ModelError("bad_score_template", value, "the file of --score-template is not an object of texts", remedy)
    unknown = sorted(given.keys() - set(_NAMES))
    missing = [name for name in _NAMES[:4] if name not in given]
    missing += [f"{each} in body" for each in _NEEDED if each not in given.get("body", each)]
    if unknown or missing:
        reason = (
            f"the file of --score-template lacks {', '.join(missing)}" if missing else f"it has {', '.join(unknown)}"
        )
        raise ModelError("bad_score_template", value, reason, remedy)
    return ScoreTemplate(**given)

"""Prompts for text between a beginning and an end ("fill in the middle", Bavarian et al. 2022).

    begin + prefix + hole + suffix + end          the model writes what belongs at the hole

Owns how each family of models marks the parts, and which family a tokenizer belongs to. Sources: the tokenizers and
model cards of these models. Must not know requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from srv.errors import ModelError
from srv.server.text.processor import TextProcessor


@dataclass(frozen=True, slots=True)
class FillIn:
    """How one family of models marks the parts. `suffix_first`: the end comes before the beginning."""

    name: str
    begin: str
    hole: str
    end: str = ""
    suffix_first: bool = False

    def prompt(self, prefix: str, suffix: str) -> str:
        first, second = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        return f"{self.begin}{first}{self.hole}{second}{self.end}"

    @property
    def markers(self) -> list[str]:
        return [marker for marker in (self.begin, self.hole, self.end) if marker]


FILL_INS = (
    FillIn("qwen_coder", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    FillIn("star_coder", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    FillIn("deepseek_coder", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillIn("glm_coder", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillIn("codestral", "[SUFFIX]", "[PREFIX]", suffix_first=True),
)
_FIELDS = ("fim_begin_token", "fim_middle_token", "fim_end_token", "fim_position")


def fill_in_of(text: TextProcessor) -> FillIn | None:
    """The first family whose markers are all single tokens of this tokenizer; None if there is none."""
    if not text.has_tokenizer:
        return None
    return next(
        (fill_in for fill_in in FILL_INS if all(len(text.encode(mark, False)) == 1 for mark in fill_in.markers)), None
    )


def read_fill_in(value: str) -> FillIn:
    """The value of --completion-template: a name of `FILL_INS`, or a JSON file as SGLang reads it.

    Raises ModelError with code not_found or bad_completion_template.
    """
    for fill_in in FILL_INS:
        if value == fill_in.name:
            return fill_in
    path = Path(value).expanduser()
    names = ", ".join(fill_in.name for fill_in in FILL_INS)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"it is no name of a completion template, and no file that can be read ({error})"
        raise ModelError("not_found", value, reason, f"Give a JSON file or one of: {names}") from error
    except (ValueError, RecursionError) as error:
        reason = f"the file of --completion-template is not JSON ({error})"
        raise ModelError("bad_completion_template", value, reason, f"Give a JSON file or one of: {names}") from error
    values = [fields.get(name) if isinstance(fields, dict) else None for name in _FIELDS]
    texts = [text for text in values if isinstance(text, str)]
    if len(texts) < len(_FIELDS) or texts[-1].lower() not in ("middle", "end"):
        reason = f'the file of --completion-template needs the texts {", ".join(_FIELDS)}, the last "middle" or "end"'
        raise ModelError("bad_completion_template", value, reason, f"Give them, or use one of: {names}")
    begin, middle, end, position = texts
    # SGLang says where the token stands that it calls the middle one: at the hole, or at the end of the prompt.
    hole, last = (middle, end) if position.lower() == "middle" else (end, middle)
    return FillIn(path.stem, begin, hole, last)

"""One prompt of a request, before and after it has been checked and tokenized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from srv.server.request.grammars import CheckedGrammar
from srv.server.request.prompts import Prompt
from srv.server.request.sampling_fields import Sampling
from srv.server.text.stop_regex import StopRegex
from srv.types import SamplingParams


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a request. `param`: the request's field with it. `field(name)`: that with the field `name` of
    `Sampling`, by default of the same name. `namespace`: of the prefix cache. `markers`: see `TokenizedPrompt`. `clip`:
    a `max_tokens` that does not fit is cut to what fits instead of refused. `owner`: as in `RequestSpec`."""

    prompt: Prompt
    sampling: Sampling
    param: str
    field: Callable[[str], str] = str
    namespace: str = ""
    markers: tuple[str, ...] = ()
    clip: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """One prompt, from which n sequences are generated. `seeds` has n entries.

    `sampling` is what the client requested, `params` what the engine gets, with one of the seeds for each sequence.
    `params.max_tokens` is at least 1; `score_only` is set if the client requested 0 tokens. `namespace`: as in
    `RequestSpec`. `markers`: what stays in the text of the output although special tokens are skipped. `grammar`: what
    each output must follow. `stop_regex`: the automaton of `sampling.stop_regex`.
    """

    text: str | None  # the prompt as text, if it came as text and is complete
    tokens: list[int]
    sampling: Sampling
    params: SamplingParams
    seeds: tuple[int, ...]
    score_only: bool
    namespace: str = ""
    markers: tuple[str, ...] = ()
    grammar: CheckedGrammar | None = None
    stop_regex: StopRegex | None = None

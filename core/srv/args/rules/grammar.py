"""Rules for structured output: its backend has to be installed, and the arguments of JSON need one."""

from __future__ import annotations

from srv.grammar.registry import GRAMMAR_OFF, best, find, installed
from srv.platform.facts import Constraint, Default, ResolutionContext


def _is_installed(context: ResolutionContext) -> str | None:
    name = context["grammar_backend"]
    facts = None if name == GRAMMAR_OFF else find(name)
    if facts is None or installed(facts):
        return None
    needed = f" (pip install 'srv[{facts.extra}]')" if facts.extra else ""
    return f"the distribution {facts.distribution} is not installed{needed}"


def _pattern_is_used(context: ResolutionContext) -> str | None:
    if context["constrained_json_whitespace_pattern"] is None or not context["constrained_json_disable_any_whitespace"]:
        return None
    return "no white space is allowed at all (constrained_json_disable_any_whitespace is true)"


def _pattern_is_taken(context: ResolutionContext) -> str | None:
    if context["constrained_json_whitespace_pattern"] is None or context["grammar_backend"] != "xgrammar":
        return None
    return "xgrammar takes no pattern for white space (grammar_backend is xgrammar)"


def _has_grammars(argument: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        if not context[argument] or context["grammar_backend"] != GRAMMAR_OFF:
            return None
        return f"no output is constrained (grammar_backend is {GRAMMAR_OFF})"

    return Constraint(argument, "other_missing", check, "Leave it out, or choose a grammar backend.", _READS)


_READS = ("grammar_backend",)

DEFAULTS: tuple[Default, ...] = (
    Default("grammar_backend", lambda context: best(), "of the installed grammar backends it has the highest priority"),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "grammar_backend",
        "not_installed",
        _is_installed,
        f"Install it with pip, or leave it out, or set it to {GRAMMAR_OFF}.",
    ),
    Constraint(
        "constrained_json_whitespace_pattern",
        "excluded",
        _pattern_is_used,
        "Leave one of them out.",
        reads=("constrained_json_disable_any_whitespace",),
    ),
    Constraint(
        "constrained_json_whitespace_pattern",
        "backend_ignores",
        _pattern_is_taken,
        "Leave it out, or choose another grammar backend.",
        reads=("grammar_backend",),
    ),
    _has_grammars("constrained_json_whitespace_pattern"),
    _has_grammars("constrained_json_disable_any_whitespace"),
)

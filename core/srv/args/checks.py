"""Checks that a declaration can apply to its value; each check describes the values that it accepts.

Pure functions of plain values: this module must not know arguments, platforms or the command line.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """A constraint on one value. `expected` completes "must be ..." and is printed in help, refusals and docs.

    `schema`: the equivalent JSON Schema keywords, as far as JSON Schema can express the check.
    """

    expected: str
    accepts: Callable[[Any], bool]
    schema: tuple[tuple[str, Any], ...] = ()


def at_least(minimum: float) -> ValueCheck:
    """A number greater than or equal to `minimum`."""
    return ValueCheck(f"at least {minimum}", lambda value: bool(value >= minimum), (("minimum", minimum),))


def above(bound: float) -> ValueCheck:
    """A number greater than `bound`."""
    return ValueCheck(f"above {bound}", lambda value: bool(value > bound), (("exclusiveMinimum", bound),))


def between(minimum: float, maximum: float) -> ValueCheck:
    """A number in the closed interval [minimum, maximum]."""
    return ValueCheck(
        f"between {minimum} and {maximum}",
        lambda value: bool(minimum <= value <= maximum),
        (("minimum", minimum), ("maximum", maximum)),
    )


def fraction() -> ValueCheck:
    """A number strictly between 0 and 1."""
    return ValueCheck(
        "above 0 and below 1", lambda value: bool(0 < value < 1), (("exclusiveMinimum", 0), ("exclusiveMaximum", 1))
    )


def at_least_or(minimum: float, special: float, meaning: str) -> ValueCheck:
    """A number greater than or equal to `minimum`, or the value `special`, which means `meaning`."""
    return ValueCheck(
        f"at least {minimum}, or {special} ({meaning})",
        lambda value: bool(value >= minimum or value == special),
        (("anyOf", [{"minimum": minimum}, {"const": special}]),),
    )


def one_of(*values: Any) -> ValueCheck:
    """One of the listed values."""
    expected = "one of " + ", ".join(str(value) for value in values)
    return ValueCheck(expected, lambda value: value in values, (("enum", list(values)),))


def not_empty() -> ValueCheck:
    """A string that is not only white space, or a list that is not empty."""
    return ValueCheck("not empty", lambda value: bool(value.strip() if isinstance(value, str) else value))


def is_pattern() -> ValueCheck:
    """A regular expression."""
    return ValueCheck("a regular expression", _is_pattern)


def _is_pattern(text: str) -> bool:
    try:
        return bool(re.compile(text).pattern)
    except (re.error, RecursionError, OverflowError):
        return False


def among(*names: str) -> ValueCheck:
    """A list of some of these names, possibly empty."""
    return ValueCheck(
        "names among " + ", ".join(names),
        lambda values: all(value in names for value in values),
        (("items", {"enum": list(names)}),),
    )


def path_prefix() -> ValueCheck:
    """A path that begins with a slash and does not end with one, or an empty string."""
    return ValueCheck(
        "empty, or a path such as /llm that begins with a slash and does not end with one",
        lambda value: value == "" or bool(re.fullmatch(r"(/[\w.~-]+)+", value, re.ASCII)),
    )


def each(check: ValueCheck) -> ValueCheck:
    """A list with at least one member, all of which pass `check`."""
    return ValueCheck(
        f"a list, each {check.expected}",
        lambda values: bool(values) and all(check.accepts(value) for value in values),
        (("minItems", 1), ("items", dict(check.schema))),
    )


def json_object() -> ValueCheck:
    """A string that holds a JSON object."""
    return ValueCheck("a JSON object", lambda value: isinstance(_json(value), dict))


def json_list() -> ValueCheck:
    """A string that holds a JSON list."""
    return ValueCheck("a JSON list", lambda value: isinstance(_json(value), list))


def json_counts() -> ValueCheck:
    """A string that holds a JSON list of positive integers, with at least one."""
    return ValueCheck("a JSON list of positive integers", lambda value: _are_counts(_json(value)))


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is int and value > 0 for value in values)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def ascending() -> ValueCheck:
    """A list of non-negative numbers in strictly ascending order."""
    return ValueCheck(
        "non-negative numbers in strictly ascending order",
        lambda values: bool(values) and values[0] >= 0 and all(a < b for a, b in itertools.pairwise(values)),
        (("minItems", 1), ("items", {"minimum": 0})),
    )


def bucket_rule() -> ValueCheck:
    """A rule for the bucket bounds of a histogram: its name, followed by its numbers."""
    return ValueCheck("default, or tse MIDDLE BASE COUNT, or custom BOUND ...", _is_bucket_rule)


def _is_bucket_rule(words: tuple[str, ...]) -> bool:
    """`tse` (two sides exponential): COUNT bounds on either side of MIDDLE, at distances that are powers of BASE."""
    if not words:
        return False
    numbers = [_number(word) for word in words[1:]]
    if any(number is None for number in numbers):
        return False
    bounds = [number for number in numbers if number is not None]
    if words[0] == "default":
        return not bounds
    if words[0] == "tse":
        return len(bounds) == 3 and bounds[0] > 0 and bounds[1] > 1 and bounds[2] >= 1 and bounds[2] == int(bounds[2])
    # "customer" is a former name of the rule "custom"
    return words[0] in ("custom", "customer") and bool(bounds) and min(bounds) >= 0 and len(set(bounds)) == len(bounds)


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def adapters() -> ValueCheck:
    """Adapters to load, each as PATH, NAME=PATH, or a JSON object with lora_name and lora_path."""
    return ValueCheck(
        "a list, each PATH, NAME=PATH, or a JSON object of lora_name, lora_path and (optional) pinned",
        lambda words: bool(words) and all(_is_adapter(word) for word in words),
        (("minItems", 1),),
    )


def _is_adapter(word: str) -> bool:
    if word.startswith("{"):
        read = _json(word)
        if not isinstance(read, dict) or not {"lora_name", "lora_path"} <= read.keys():
            return False
        strings = all(isinstance(read[key], str) and read[key] for key in ("lora_name", "lora_path"))
        return strings and isinstance(read.get("pinned", False), bool)
    name, equals, path = word.partition("=")
    return bool(name.strip()) and (not equals or bool(path.strip()))


def all_or_some(*members: str) -> ValueCheck:
    """A list of some of `members`, or "all" alone."""
    return ValueCheck(
        f"all, or some of {', '.join(members)}",
        lambda words: words == ("all",) or (bool(words) and all(word in members for word in words)),
        (("minItems", 1), ("items", {"enum": ["all", *members]})),
    )

"""How configurations name layers that are not quantized: lists of names and patterns. Torch-free.

Configurations come with checkpoints, which nobody has checked. Regular expressions are therefore matched by an engine
without backtracking (that of Rust, in pydantic): the time is at most the length of a pattern times that of a name.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from srv.errors import ModelError

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

REGEX = "re:"  # what regular expressions begin with


def stated_names(quant_config: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """The names and patterns in some fields of a configuration, each a list or one string.

    Raises ValueError for other values, and for invalid regular expressions; the message is a clause without "its".
    """
    patterns: list[str] = []
    for field in fields:
        value = quant_config.get(field) or ()
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{field} is {value!r}, not a list of names")
        for name in names:
            check_pattern(field, name)
        patterns += names
    return tuple(patterns)


def check_pattern(field: str, name: str) -> None:
    """Raises ValueError, as `stated_names`, if a name is an invalid regular expression."""
    if not name.startswith(REGEX):
        return
    try:
        re.compile(name.removeprefix(REGEX))
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{field} has {name!r}, which is not a regular expression ({error})") from error


def names_layer(pattern: str, layer: str) -> bool:
    """Whether a pattern names a layer: a regular expression ("re:...") of its beginning, one with "*", or some
    segments of its path.

    Raises ModelError (unsupported_quantization) for regular expressions that need backtracking.
    """
    if pattern.startswith(REGEX):
        validator = _regex(pattern.removeprefix(REGEX))
        if validator is None:
            reason = f"its quantization_config names layers by {pattern!r}, which needs backtracking to be matched"
            remedy = "Use the checkpoint with its weights, whose names say which layers are quantized"
            raise ModelError("unsupported_quantization", layer, reason, remedy)
        return validator.isinstance_python(layer)
    if "*" in pattern:
        return fnmatch.fnmatchcase(layer, pattern) or fnmatch.fnmatchcase(layer, f"{pattern}.*")
    return f".{pattern}." in f".{layer}."


def names_any(patterns: tuple[str, ...], layer: str) -> bool:
    """Whether one of the patterns names a layer, as `names_layer`; some checkpoints list a name or more per layer."""
    plain, others = _divided(patterns)
    named = plain is not None and plain.search(f".{layer}.") is not None
    return named or any(names_layer(pattern, layer) for pattern in others)


@lru_cache(maxsize=16)
def _divided(patterns: tuple[str, ...]) -> tuple[re.Pattern[str] | None, tuple[str, ...]]:
    """One regular expression for all names, which needs no backtracking, and the other patterns."""
    others = tuple(pattern for pattern in patterns if pattern.startswith(REGEX) or "*" in pattern)
    plain = "|".join(re.escape(pattern) for pattern in patterns if pattern not in others)
    return re.compile(rf"\.(?:{plain})\.") if plain else None, others


def matched_target(targets: Collection[str], names: Sequence[str], layer_class: str) -> str | None:
    """The target of compressed-tensors that fits a layer best, which has one or several names; None if none does.

    The most specific one is first: names, regular expressions in alphabetical order, and the class.
    (compressed-tensors, `match_targets`)
    """
    patterns = sorted(target for target in targets if target.startswith(REGEX))
    exact = (name for name in names if name in targets)
    matching = (pattern for pattern in patterns if any(names_layer(pattern, name) for name in names))
    of_class = (cls for cls in (layer_class,) if cls in targets)
    return next(itertools.chain(exact, matching, of_class), None)


def needs_backtracking(pattern: str) -> bool:
    """Whether `names_layer` refuses a pattern."""
    return pattern.startswith(REGEX) and _regex(pattern.removeprefix(REGEX)) is None


@lru_cache(maxsize=256)
def _regex(pattern: str) -> SchemaValidator | None:
    """None if the engine does not support the pattern."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # imported late: most checkpoints have none

    try:
        return SchemaValidator(core_schema.str_schema(pattern=rf"\A(?:{pattern})", regex_engine="rust-regex"))
    except SchemaError:
        return None

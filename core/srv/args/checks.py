"""Checks that a declaration can put on its value: each knows how to say what it wants.

Pure functions over plain values; they know no argument, no platform and no command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """A law on one value. `wants` completes "must be ..." and is printed in help, refusals and docs."""

    wants: str
    accepts: Callable[[Any], bool]


def at_least(least: float) -> Check:
    """A number of `least` or more."""
    return Check(f"at least {least}", lambda value: bool(value >= least))


def above(bound: float) -> Check:
    """A number greater than `bound`."""
    return Check(f"above {bound}", lambda value: bool(value > bound))


def between(least: float, most: float) -> Check:
    """A number within [least, most], both included."""
    return Check(f"between {least} and {most}", lambda value: bool(least <= value <= most))


def fraction() -> Check:
    """A number strictly between 0 and 1."""
    return Check("above 0 and below 1", lambda value: bool(0 < value < 1))


def at_least_or(least: float, special: float, meaning: str) -> Check:
    """A number of `least` or more, or the one value `special`, which means `meaning`."""
    return Check(
        f"at least {least}, or {special} ({meaning})",
        lambda value: bool(value >= least or value == special),
    )


def one_of(*values: Any) -> Check:
    """One of the values listed."""
    return Check("one of " + ", ".join(str(value) for value in values), lambda value: value in values)


def not_empty() -> Check:
    """A text (or list) that holds something besides white space."""
    return Check("not empty", lambda value: bool(value.strip() if isinstance(value, str) else value))

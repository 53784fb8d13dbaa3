"""What whole models with a vision tower are built with, from the fields of a configuration. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Linear


def text_fields(c: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model within this one; the fields themselves if none is nested."""
    nested = c.get("text_config")
    return nested if isinstance(nested, Mapping) else c


def tower_fields(c: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the vision tower; {} if there is none, so that all have their defaults."""
    nested = c.get("vision_config")
    return nested if isinstance(nested, Mapping) else {}


def square(value: int | list[int]) -> int:
    """That of a patch or an image, which is a square if one size is given."""
    return math.prod(value) if isinstance(value, list) else value**2


def two_layers(up: str, down: str, inputs: int, inner: int, outputs: int) -> tuple[Linear, Linear]:
    return Linear({up: inner}, inputs, bias=True), Linear({down: outputs}, inner, bias=True)

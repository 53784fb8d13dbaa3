"""Why a configuration has no tree of parts, or no known sizes. Torch-free.

A function of an architecture raises UnsupportedConfig, whether or not there are layers for it. InvalidConfig is of a
value with which no layers at all compute. UnknownSizes is what questions about sizes raise, for whatever reason there
is none to give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CORRECT = "Correct the value in config.json, or fetch the file again"  # the remedy of an InvalidConfig


class UnsupportedConfig(ValueError):
    """A configuration needs something that the native layers do not implement; the text is a clause."""


class InvalidConfig(ValueError):
    """No model can be made of a configuration, whoever made it; the text is a clause with the field and its value."""


def refuse_unless(config: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raise UnsupportedConfig for a field with another value than those listed; None is as if it were left out.

    `where`: the beginning of the names of nested fields in the text.
    """
    for name, values in supported.items():
        if config.get(name) is not None and config[name] not in values:
            raise UnsupportedConfig(f"{where}{name} = {config[name]!r} is not implemented natively")


class UnknownSizes(Exception):
    """No size is claimed for a model. The message is a clause with the reason."""

"""`srv`: a hardware-neutral server for large language models.

The package owns scheduling, memory, arguments, the HTTP API and the platform contract. It must not
know any device: platforms are plugins, discovered through the entry-point group ``srv.platforms``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "__version__"]

if TYPE_CHECKING:
    from srv.offline import LLM


def __getattr__(name: str) -> Any:
    """`srv.LLM`, imported when it is first used: importing `srv` alone stays cheap."""
    if name == "LLM":
        return importlib.import_module("srv.offline").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The names that stored tensors of a checkpoint have in the model's layers. Torch-free.

Two things rename them: a vision model, whose language model is served alone, and the checkpoints of an architecture.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.models.architectures.registry import find
from srv.models.formats.text_names import text_weight_name


def model_names(architecture: str, part_of: str | None) -> Callable[[str], str | None]:
    """The function from a stored name to that in the model, or to None for a tensor that it does not need."""
    found = find(architecture)
    weights = None if found is None else found.weights

    def name(stored: str) -> str | None:
        own = stored if part_of is None else text_weight_name(stored)
        return own if own is None or weights is None else weights.model_name(own)

    return name

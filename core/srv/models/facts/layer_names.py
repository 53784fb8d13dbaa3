"""The names that tensors of a checkpoint have in the model's layers. Torch-free.

Two things rename them: a vision model, whose language model is served alone, and the checkpoints of an architecture.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.models.checkpoints.text_names import text_weight_name
from srv.models.families.registry import weight_mapping


def layer_names(architecture: str, part_of: str | None) -> Callable[[str], str | None]:
    """The function from a name in a checkpoint to that in the model, or to None for a tensor that it does not need."""
    mapping = weight_mapping(architecture, part_of)

    def name(stored: str) -> str | None:
        of_text = stored if part_of is None else text_weight_name(stored)
        return None if of_text is None else mapping.layer_name(of_text)

    return name

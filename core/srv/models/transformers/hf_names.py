"""The names that the tensors of a checkpoint have in a class of transformers: its own conversion of checkpoints, asked.

Must not know how tensors are stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)


class ClassTensor(NamedTuple):
    """Where a stored tensor goes. `name`: of the tensor in the class, of which it may be a part.

    `converter`: what makes that one of it, with others; None if it is only renamed. `source`: which of the patterns of
    the converter its name fits.
    """

    name: str
    converter: WeightConverter | None = None
    source: int = 0


class ClassNames:
    """`model`: a model of transformers, which may be without weights."""

    def __init__(self, model: Any) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._prefix, self._tensors = model.base_model_prefix, model.state_dict()

    def __contains__(self, name: str) -> bool:
        """Whether the class has a tensor of this name, or one of which a stored tensor of this name is a part."""
        return self.of(name).name in self._tensors

    def of(self, stored: str) -> ClassTensor:
        """As transformers finds it. The name that it returns may be that of no tensor of the class."""
        name, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._tensors)
        if name not in self._tensors and stored in self._tensors:
            return ClassTensor(stored)
        for converter in self._converters if pattern is not None else ():
            if pattern in converter.source_patterns:
                return ClassTensor(name, converter, converter.source_patterns.index(pattern))
        return ClassTensor(name)


def stacks_experts(converter: WeightConverter) -> bool:
    """Whether what it makes is [E, ...] of the weights of single experts: of one projection, or of two as halves."""
    first, *others = converter.operations
    if not isinstance(first, MergeModulelist) or first.dim != 0 or len(converter.target_patterns) != 1:
        return False
    if len(converter.source_patterns) == 1:
        return not others
    (halves,) = others if len(others) == 1 else (None,)
    return len(converter.source_patterns) == 2 and isinstance(halves, Concatenate) and halves.dim == 1

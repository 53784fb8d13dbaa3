"""How formats count what a checkpoint without weights stores (`QuantMethod.stored`). Torch-free. Must not know formats.

Counts are those of the tools that write a format, whether layers support the form or not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from srv.errors import ModelError
from srv.quantization.formats.layer_patterns import check_pattern, matched_target, names_layer
from srv.quantization.method import StoredCounts, StoredMatrix, UnknownStorage

# (outputs, inputs) of a weight -> elements by dtype
Layout: TypeAlias = Callable[[int, int], Mapping[str, int]]
Result = TypeVar("Result")
_NAMED_EXPERT = re.compile(r"experts\.\d")


def one_layout(layout: Layout, excluded: Sequence[str], *, head: bool = False) -> StoredCounts:
    """One layout for all weights but the excluded ones and, unless `head`, the output layer."""

    def counts(matrix: StoredMatrix) -> Mapping[str, int] | None:
        if (matrix.is_head and not head) or is_named(matrix.name, excluded):
            return None
        return layout(matrix.outputs, matrix.inputs)

    return counts


def linear_layers(counts: StoredCounts) -> StoredCounts:
    """The counts of tools that quantize linear layers: those of a model with experts are not known.

    Whether experts are linear layers, or parameters of a layer of their own, depends on the release of transformers
    that wrote the checkpoint.
    """

    def of_linear(matrix: StoredMatrix) -> Mapping[str, int] | None:
        if matrix.copies:
            reason = "whether its experts are quantized depends on the release of transformers that wrote the files"
            raise UnknownStorage(reason)
        return counts(matrix)

    return of_linear


def names_of(config: Mapping[str, Any], *fields: str) -> list[str]:
    """The names and patterns of layers in some fields."""
    names = [name for field in fields for name in config.get(field) or ()]
    if any(_NAMED_EXPERT.search(name) for name in names):
        raise UnknownStorage("its quantization treats experts of one layer differently")
    return names


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names a layer or one around it."""

    def is_match() -> bool:
        for pattern in patterns:
            check_pattern("its quantization_config", pattern)
            if names_layer(pattern, name):
                return True
        return False

    return or_unknown_storage(is_match)


def target_of(targets: Collection[str], name: str, layer_class: str) -> str | None:
    """The target of compressed-tensors that fits a layer best."""

    def best_target() -> str | None:
        for target in targets:
            check_pattern("its quantization_config", target)
        return matched_target(targets, (name,), layer_class)

    return or_unknown_storage(best_target)


def or_unknown_storage(function: Callable[[], Result]) -> Result:
    """The result of a function that reads patterns; its errors become UnknownStorage."""
    try:
        return function()
    except (ValueError, ModelError) as error:
        reason = error.reason if isinstance(error, ModelError) else str(error)
        raise UnknownStorage(reason) from error


def group_size(config: Mapping[str, Any], *fields: str) -> int:
    """Inputs per scale; 0 for all of them."""
    return max(0, int(next((config[field] for field in fields if config.get(field) is not None), 0)))


def bits_of(config: Mapping[str, Any], *fields: str) -> int:
    """The bits of integers that are packed into words of 32 bits."""
    bits = next((config[field] for field in fields if field in config), None)
    if bits not in (2, 4, 8):
        raise UnknownStorage(f"weights of {bits} bits are not known")
    return int(bits)


def ceil(total: int, size: int) -> int:
    return -(-total // size)

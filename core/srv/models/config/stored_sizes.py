"""How many bytes a checkpoint without its weights would store, by dtype: a walk over the tree of its model.

How a quantization method stores a matrix is `QuantMethod.stored`. This module must not know methods, nor families.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from srv.dtypes import STORED_SIZES
from srv.models.blueprint import Decoder, Experts, Linear, Output, Part, Tensors, Weight, below, walk
from srv.models.checkpoints.rules import WeightMapping
from srv.quantization.method import StoredCounts, StoredMatrix, UnknownStorage
from srv.quantization.registry import find

_WEIGHT = ".weight"


def stored_types(
    tree: Part, dtype: str, quantization: Mapping[str, Any] | None = None, mapping: WeightMapping | None = None
) -> dict[str, int]:
    """The number of stored elements of each dtype. `dtype`: that of weights which are not quantized.

    `quantization`: the field `quantization_config`. `mapping`: how checkpoints name and fuse matrices of the tree, if
    they do otherwise. Raises UnknownStorage if its method does not say what it stores.
    """
    counts_of = _counts_of(quantization, dtype) if quantization else None
    counts: Counter[str] = Counter()
    decoder = next((name for name, part in walk(tree) if isinstance(part, Decoder)), "")
    for name, part in walk(tree):
        plain, of_layers = part.elements, not decoder or name.startswith(f"{decoder}.")  # a tower has names of its own
        for matrix in _matrices_of(name, part, mapping if mapping is not None and of_layers else WeightMapping()):
            if counts_of is not None and (stored := counts_of(matrix)) is not None:
                plain -= matrix.elements
                for item, elements in stored.items():
                    counts[item] += elements * max(1, matrix.copies)
        counts[dtype] += plain
    return {name: count for name, count in counts.items() if count}


def _matrices_of(name: str, part: Part, mapping: WeightMapping) -> Iterator[StoredMatrix]:
    """The matrices of a part itself. Routers stay as they are."""
    if isinstance(part, Linear) and not part.role:
        is_head = isinstance(part, Output)
        if isinstance(part, Output) and part.tied:
            return
        names = tuple(below(name, each) for each in part.outputs)
        whole, sizes = mapping.fused(names), part.outputs.values()
        for each, size in zip(whole, sizes if whole == names else [sum(sizes)], strict=True):
            yield StoredMatrix(mapping.checkpoint_name(each), size, part.inputs, is_head=is_head)
    else:
        copies = part.count if isinstance(part, Experts) else 0
        for weight in _matrices(part):
            outputs, inputs = weight.shape
            owner = mapping.checkpoint_name(below(name, weight.name.removesuffix(_WEIGHT)))
            yield StoredMatrix(owner, outputs, inputs, copies)


def _matrices(part: Part) -> Iterator[Weight]:
    """Those of the first expert, or of what layers do not multiply by as it is."""
    if isinstance(part, Experts):
        first = itertools.takewhile(lambda weight: weight.name.startswith("0."), part.weights())
        yield from (weight for weight in first if weight.name.endswith(_WEIGHT))
    elif isinstance(part, Tensors) and part.projects:
        yield from part.weights()


def stored_bytes(types: Mapping[str, int]) -> int:
    """The bytes of these elements."""
    return sum(count * STORED_SIZES[name] for name, count in types.items())


def _counts_of(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    stated = config.get("quant_method")
    method = find(stated) if isinstance(stated, str) else None
    if method is None or method.stored is None:
        raise UnknownStorage(f"the sizes of weights that are quantized with {stated} are not known")
    return method.stored(config, dtype)

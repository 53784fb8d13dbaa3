"""Applies the rules of an architecture to the tensors of its checkpoints: the one place where tensors change so.

    unquantized    transpose ── permute the rows ── split ── convert
    quantized      transpose what is unquantized ── convert ── permute the rows; fused matrices stay whole
    dequantized    convert ── transpose what was unquantized ── permute the rows ── split

What converts is the format of the method of the weights, which gets the tensors of layers, or quantized ones as they
are stored. Every method makes tensors whose rows are the outputs of a layer: its integers, FP8 values or blocks, and
scales of rows or of blocks of rows, which are permuted with their rows. Must not know files, names of architectures or
how a method stores weights. Experts that are stacked are divided before (`srv.models.checkpoints.stacked_experts`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.checkpoints.row_orders import RowOrder, SizedRules
from srv.models.checkpoints.storage import StorageFormat

_WEIGHT = ".weight"
_BY_OUTPUT = ("weight", "bias")
_NORM = "_norm"  # of each head, which may have an axis of heads


class QuantizedTensors(NamedTuple):
    """The tensors of a quantized checkpoint.

    `suffixes`, `block`: as `row_tensors` and `row_block` of a `QuantMethod`. `types`: the dtypes of the stored tensors,
    by name. `path`: of the checkpoint, for errors.
    """

    suffixes: tuple[str, ...] = ()
    block: int = 1
    types: Mapping[str, str] = MappingProxyType({})
    path: str = ""


class RuleStorage(StorageFormat):
    """`inner`: the format of the method of the weights. `quantized`: None for unquantized tensors.

    `stored_types`: where tensors have been dequantized before, the dtypes of the stored ones, by name: weights that are
    not among them have an order of their own.
    """

    def __init__(
        self,
        rules: SizedRules,
        inner: StorageFormat,
        quantized: QuantizedTensors | None = None,
        stored_types: Mapping[str, str] | None = None,
    ) -> None:
        self._rules, self._mapping, self._inner = rules, rules.mapping, inner
        self._is_quantized, self._tensors = quantized is not None, quantized or QuantizedTensors()
        self._stored_types = stored_types
        self._suffixes = {*_BY_OUTPUT, *self._tensors.suffixes}
        self._outputs: dict[str, int] = {}  # of each quantized layer, once `shapes` has seen its weight

    def parts(self, name: str) -> tuple[str, ...]:
        return tuple(part for each in self._split(name) for part in self._inner.parts(each))

    def is_read_whole(self, name: str) -> bool:
        if self._is_quantized:
            return True  # a row may be anywhere
        is_divided = len(self.parts(name)) > 1
        return is_divided or self._mapping.is_transposed(name) or self._inner.is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return self._inner.unused(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            parts = self._split(name)
            shape = tuple(reversed(shape)) if self._is_transposed(name) else shape
            sizes = self._rules.split_sizes(name, shape[0]) if len(parts) > 1 and shape else []
            if sizes and sum(sizes) == shape[0]:  # otherwise the shape is reported
                found |= {part: (rows, *shape[1:]) for part, rows in zip(parts, sizes, strict=True)}
            else:
                found[name] = shape
        converted = self._inner.shapes(found)
        weights = {name.removesuffix(_WEIGHT): shape for name, shape in converted.items() if name.endswith(_WEIGHT)}
        self._outputs = {layer: shape[0] for layer, shape in weights.items() if shape}
        return converted

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        stored = stored.t() if self._is_transposed(name) else stored
        if name.removesuffix(_WEIGHT) in self._rules.unit_rows:
            stored = F.normalize(stored.float())
        if self._is_quantized:
            return {each: self._permuted(each, tensor) for each, tensor in self._inner.convert(name, stored).items()}
        parts, tensor = self._split(name), self._permuted(name, stored)
        tensors = torch.split(tensor, self._rules.split_sizes(name, len(tensor))) if len(parts) > 1 else (tensor,)
        converted: dict[str, Tensor] = {}
        for part, tensor in zip(parts, tensors, strict=True):
            converted |= self._inner.convert(part, tensor)
        return converted

    def _split(self, name: str) -> tuple[str, ...]:
        return (name,) if self._is_quantized else self._mapping.split(name)

    def _is_transposed(self, name: str) -> bool:
        """Whether a stored tensor is an unquantized weight [in, out]; packed integers have an order of their own."""
        if self._stored_types is None:
            is_float = self._tensors.types.get(name, FLOATS[0]) in FLOATS
        else:
            is_float = self._stored_types.get(name) in FLOATS
        return is_float and self._mapping.is_transposed(name)

    def _permuted(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor with an entry for each row of its layer, or for each block of rows, in the order of the layer."""
        layer, _, suffix = name.rpartition(".")
        if suffix not in self._suffixes or tensor.dim() == 0:
            return tensor
        order = self._rules.order(layer, self._outputs.get(layer, len(tensor)))
        if order is None:
            return tensor
        is_norm, outputs, block = layer.endswith(_NORM), len(order.period) * order.repeats, self._tensors.block
        if not self._is_quantized or is_norm or len(tensor) == outputs:
            return _take(order, tensor.flatten() if is_norm else tensor).reshape(tensor.shape)
        if suffix in _BY_OUTPUT or len(tensor) != -(-outputs // block):
            return tensor  # the loader reports its shape, or it has one value for the whole matrix
        moved = order.of_blocks(block)
        if moved is None:
            reason = f"the rows of {layer} are in another order than those of its layer, and leave their blocks of "
            reason += f"{block} rows, which share a scale"
            remedy = "Use the checkpoint in full precision; --torchao-config quantizes it at load"
            raise ModelError("unsupported_quantization", self._tensors.path, reason, remedy)
        return tensor[torch.tensor(moved)]


class DequantizedStorage(StorageFormat):
    """`first` dequantizes the tensors of a checkpoint, and `then` converts the floats by the rules."""

    def __init__(self, first: StorageFormat, then: StorageFormat) -> None:
        self._first, self._then = first, then

    def parts(self, name: str) -> tuple[str, ...]:
        return tuple(part for each in self._first.parts(name) for part in self._then.parts(each))

    def is_read_whole(self, name: str) -> bool:
        return self._first.is_read_whole(name) or self._then.is_read_whole(name)

    def unused(self, names: Collection[str]) -> set[str]:
        return self._first.unused(names) | self._then.unused(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return self._then.shapes(self._first.shapes(stored))

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        made = self._first.convert(name, stored).items()
        return {part: each for between, tensor in made for part, each in self._then.convert(between, tensor).items()}


def _take(order: RowOrder, rows: Tensor) -> Tensor:
    """The rows of a whole layer, of the heads of one rank, or the values of norms of heads, in order."""
    period = torch.tensor(order.period)
    return rows.reshape(-1, len(period), *rows.shape[1:]).index_select(1, period).flatten(0, 1)

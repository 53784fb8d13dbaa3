"""Puts the rows of quantized matrices in the order of the layers, after the method of the weights has converted them.

Every method makes tensors whose rows are the outputs of a layer: its integers, FP8 values or blocks, and scales of rows
or of blocks of rows. The same order applies to all of them, and matrices that a checkpoint fuses stay whole. Must not
know how a method stores weights; `srv.models.formats.architecture_storage` does this for unquantized checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.formats.rotary_rows import RotaryRows
from srv.models.formats.row_orders import block_order, row_orders, swapped_halves
from srv.models.formats.storage import StorageFormat
from srv.models.formats.stored_weights import StoredWeights
from srv.specs import AttentionLayer

_WEIGHT = ".weight"
_BY_OUTPUT = ("weight", "bias")
_NORMS = (".q_norm", ".k_norm")  # of each head, whose weights have the order of the rows


class RowTensors(NamedTuple):
    """As `row_tensors` and `row_block` of a `QuantMethod`."""

    suffixes: tuple[str, ...]
    block: int


class OrderedRows(StorageFormat):
    """`layer`, `rotary_dim`: as of `row_orders`. `inner`: the format of the method of the weights.

    `rows`: which of its tensors have the rows of a layer. `types`: the dtypes of the stored tensors, by name.
    `path`: of the checkpoint, for errors.
    """

    def __init__(
        self,
        weights: StoredWeights,
        layer: AttentionLayer,
        rotary_dim: int,
        inner: StorageFormat,
        rows: RowTensors,
        types: Mapping[str, str],
        path: str,
    ) -> None:
        self._weights, self._inner, self._types, self._path = weights, inner, types, path
        self._suffixes, self._block = {*_BY_OUTPUT, *rows.suffixes}, rows.block
        self._orders = row_orders(weights, layer, rotary_dim)
        self._of_head: list[int] | None = None  # of norms of each head
        if rotary_dim and layer.latent is None:
            self._of_head = RotaryRows((), 1, layer.head_dim, 0, rotary_dim).order()
        self._outputs: dict[str, int] = {}  # of each layer, once `shapes` has seen its weight

    def parts(self, name: str) -> tuple[str, ...]:
        return self._inner.parts(name)

    def is_read_whole(self, name: str) -> bool:
        return True  # a row may be anywhere

    def unused(self, names: Collection[str]) -> set[str]:
        return self._inner.unused(names)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        turned = {name: tuple(reversed(shape)) if self._is_turned(name) else shape for name, shape in stored.items()}
        found = self._inner.shapes(turned)
        weights = {name.removesuffix(_WEIGHT): shape for name, shape in found.items() if name.endswith(_WEIGHT)}
        self._outputs = {layer: shape[0] for layer, shape in weights.items() if shape}
        return found

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        stored = stored.t() if self._is_turned(name) else stored
        return {each: self._ordered(each, tensor) for each, tensor in self._inner.convert(name, stored).items()}

    def _is_turned(self, name: str) -> bool:
        """Whether a stored tensor is an unquantized weight [in, out]; packed integers have an order of their own."""
        return self._types.get(name, FLOATS[0]) in FLOATS and self._weights.is_transposed(name)

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        layer, _, suffix = name.rpartition(".")
        if suffix not in self._suffixes or tensor.dim() == 0:
            return tensor
        if self._of_head is not None and layer.endswith(_NORMS):
            heads = tensor.reshape(-1, len(self._of_head))
            return heads[:, torch.tensor(self._of_head)].reshape(tensor.shape)
        order = self._order(layer)
        if order is None:
            return tensor
        if tensor.shape[0] == len(order):
            return tensor[torch.tensor(order)]
        blocks = -(-len(order) // self._block)
        if suffix in _BY_OUTPUT or tensor.shape[0] != blocks:
            return tensor  # the loader reports its shape, or it has one value for the whole matrix
        moved = block_order(order, self._block)
        if moved is None:
            reason = f"the rows of {layer} are in another order than those of its layer, and leave their blocks of "
            reason += f"{self._block} rows, which share a scale"
            remedy = "Use the checkpoint in full precision; --torchao-config quantizes it at load"
            raise ModelError("unsupported_quantization", self._path, reason, remedy)
        return tensor[torch.tensor(moved)]

    def _order(self, layer: str) -> list[int] | None:
        found = next((order for end, order in self._orders.items() if layer.endswith(end)), None)
        weights = self._weights
        if found is None and weights.up_first and weights.fused_mlp and layer.endswith(f".{weights.fused_mlp}"):
            return swapped_halves(self._outputs[layer])
        return found

"""Linear layers, whole or sharded over ranks.

    split    this rank's weight                     its outputs
    "out"    its rows of each fused layer           its outputs of each
    "in"     its columns                            partial sums of all outputs: the model adds them up (all-reduce)
    "sum"    the whole weight, of partial sums      likewise

Owns weights on the model's device, and the names that checkpoints give to them, so that loaders can fill them
(`weight_views`). Must not know files. Quantized linear layers are in `srv.quantization`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.models.checkpoints.slices import Slice
from srv.models.layers.context import BuildContext
from srv.models.layers.op_layer import TORCH, OpLayer

Split: TypeAlias = Literal["out", "in", "sum"]
FLOAT32_OP = "linear_float32"


class Sharding(NamedTuple):
    """How the weights of fused layers are divided: the rows of each one, or the columns, that this rank holds.

    `adds_bias`: this rank adds what is added once to the sums of all ranks.
    """

    rows: Mapping[str, Slice] = MappingProxyType({})
    columns: Slice | None = None
    adds_bias: bool = True


WHOLE = Sharding()


class Projection(OpLayer, ABC):
    """A linear layer [T, in] -> [T, out], computed by a kernel that the platform may replace.

    `output_sizes`: the number of outputs on this rank of each linear layer of the checkpoint that this one fuses (for
    example q_proj, k_proj and v_proj), by its name. Their weights are consecutive rows of this layer's weight.
    `sharding`: which part of the checkpoint's layers these are.
    """

    def __init__(
        self, dtype: torch.dtype, output_sizes: Mapping[str, int], inputs: int, sharding: Sharding = WHOLE
    ) -> None:
        super().__init__()
        self.dtype, self.inputs = dtype, inputs
        self.output_sizes = dict(output_sizes)
        self.sharding = sharding

    def keep_float32(self, context: BuildContext) -> None:
        """Return the float32 sums, not rounded to the model's dtype, where kernels can; for the output layer.

        Called after the layer is built. Without an op for it, results are rounded.
        """
        self.float32_results = self.dtype != torch.float32

    @abstractmethod
    def weight_views(self) -> dict[str, Tensor]:
        """The tensors that a loader fills, by their names in the checkpoint. They are views of the fused weights."""

    def weight_slices(self) -> dict[str, Slice]:
        """The slices of the checkpoint's tensors that the `weight_views` hold, by name; of those that are not whole."""
        slices: dict[str, Slice] = {}
        for name in self.weight_views():
            layer, _, suffix = name.rpartition(".")
            if layer in self.sharding.rows:
                slices[name] = self.sharding.rows[layer]
            elif self.sharding.columns is not None and suffix == "weight":
                slices[name] = self.sharding.columns
        return slices

    def validate_loaded(self) -> str | None:
        """Check the loaded values; called once, after loading. The reason why they are not supported, or None."""
        return None

    def part_views(self, suffix: str, fused: Tensor) -> dict[str, Tensor]:
        """Views of the rows of each fused layer, by its name and the suffix."""
        views = torch.split(fused, list(self.output_sizes.values()))
        return {f"{name}.{suffix}": view for name, view in zip(self.output_sizes, views, strict=True)}


class Linear(Projection):
    """y = x Wᵀ + b in the model's dtype.

    weight [out, in], bias [out] or None. With `tied`, `weight` is also that of the embedding: it is loaded there, and
    must not be changed. Of ranks that hold columns, only the first adds the bias; the others load it and drop it.
    """

    op = "linear"
    implementation = TORCH

    def __init__(
        self,
        context: BuildContext,
        output_sizes: Mapping[str, int],
        inputs: int,
        bias: bool,
        weight: nn.Parameter | None = None,
        sharding: Sharding = WHOLE,
    ) -> None:
        super().__init__(context.dtype, output_sizes, inputs, sharding)
        self.tied = weight is not None
        outputs = sum(output_sizes.values())
        self.weight = context.empty(outputs, inputs) if weight is None else weight
        self._loaded_bias = context.empty(outputs) if bias else None
        self.bias = self._loaded_bias if sharding.adds_bias else None
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        """The default kernel: torch's own matrix product."""
        return F.linear(x, self.weight, self.bias)

    def keep_float32(self, context: BuildContext) -> None:
        super().keep_float32(context)
        sizes = {"inputs": self.inputs, "outputs": self.weight.shape[0]}
        if self.float32_results and self.bias is None and context.offers(FLOAT32_OP, **sizes):
            product = context.bind(FLOAT32_OP, **sizes)
            self.kernel = lambda x: product(x, self.weight)
            self.implementation = context.name_of(FLOAT32_OP, **sizes)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return ({"weight": self.weight, "bias": self.bias},)

    def weight_views(self) -> dict[str, Tensor]:
        views = {} if self.tied else self.part_views("weight", self.weight)
        bias = self._loaded_bias
        return views if bias is None else views | self.part_views("bias", bias)

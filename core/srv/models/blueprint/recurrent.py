"""Parts that keep states of a fixed size per request: convolutions over time and linear recurrences. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

from srv.models.blueprint import DividedSize, JointNorm, Linear, Norm, OpUse, Part, Recurrent, Tensors, torch_op
from srv.models.layers.delta_sizes import DeltaSizes
from srv.models.layers.recurrent_sizes import (
    GATED_NORM,
    LinearRecurrenceSizes,
    ScanSizes,
    SelectiveScanSizes,
    ShortConvolutionSizes,
    StateSpaceSizes,
)

CONVOLUTION = "causal_conv1d"


@dataclass(frozen=True)
class ShortConvolution(Recurrent):
    """A gated convolution over time (LFM2)."""

    inputs: Linear
    convolution: Tensors
    output: Linear
    sizes: ShortConvolutionSizes

    @property
    def convolved(self) -> tuple[int, int]:
        return self.sizes.channels, self.sizes.width

    def ops(self, dtype: str) -> Iterator[OpUse]:
        yield _convolution(self.sizes.channels, self.sizes.width)

    @property
    def is_divided(self) -> bool:
        return self.inputs.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("channels of convolutions", self.sizes.channels)

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(super().of_rank(ranks), sizes=self.sizes.of_rank(ranks))


@dataclass(frozen=True)
class DeltaNet(Recurrent):
    """The gated delta rule (Qwen3-Next)."""

    inputs: Linear
    rates: Linear
    tensors: Tensors
    norm: Norm
    output: Linear
    sizes: DeltaSizes

    @property
    def convolved(self) -> tuple[int, int]:
        return self.sizes.channels, self.sizes.width

    @property
    def state(self) -> tuple[int, ...]:
        return self.sizes.value_heads, self.sizes.key_dim, self.sizes.value_dim

    def ops(self, dtype: str) -> Iterator[OpUse]:
        sizes = self.sizes
        heads = {"key_heads": sizes.key_heads, "value_heads": sizes.value_heads}
        yield _convolution(sizes.channels, sizes.width)
        yield OpUse("gated_delta_rule", {**heads, "key_dim": sizes.key_dim, "value_dim": sizes.value_dim})

    @property
    def is_divided(self) -> bool:
        return self.inputs.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("key heads of linear attention", self.sizes.key_heads)

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(super().of_rank(ranks), sizes=self.sizes.of_rank(ranks))


@dataclass(frozen=True)
class StateSpace(Recurrent):
    """A Mamba-2 mixer. `input_factors`: multiply gates, values, b, c and steps (Falcon-H1); () for none."""

    inputs: Linear
    tensors: Tensors
    output: Linear
    sizes: StateSpaceSizes
    norm_eps: float
    input_factors: tuple[float, ...] = ()

    @property
    def convolved(self) -> tuple[int, int]:
        return self.sizes.channels, self.sizes.width

    @property
    def state(self) -> tuple[int, ...]:
        return self.sizes.scan.heads, self.sizes.scan.head_dim, self.sizes.scan.state_size

    def ops(self, dtype: str) -> Iterator[OpUse]:
        scan = self.sizes.scan
        yield _convolution(self.sizes.channels, self.sizes.width)
        yield OpUse("state_space_scan", scan.op_sizes)
        if self.sizes.norm:
            yield torch_op(GATED_NORM, scan.inner // scan.groups)

    @property
    def is_divided(self) -> bool:
        return self.inputs.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("heads of state-space layers", self.sizes.scan.heads)
        yield DividedSize("groups of state-space heads", self.sizes.scan.groups, copied=True)

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(super().of_rank(ranks), sizes=self.sizes.of_rank(ranks))


@dataclass(frozen=True)
class Lightning(Recurrent):
    """Lightning attention (MiniMax-Text-01). `decay`: by which decays are multiplied: from 1 in the first layer down to
    nearly 0 in the last one.
    """

    qkv: Linear
    gate: Linear
    norm: JointNorm
    output: Linear
    sizes: ScanSizes
    decay: float

    @property
    def state(self) -> tuple[int, ...]:
        return self.sizes.heads, self.sizes.head_dim, self.sizes.state_size

    def ops(self, dtype: str) -> Iterator[OpUse]:
        yield OpUse("state_space_scan", self.sizes.op_sizes)

    @property
    def is_divided(self) -> bool:
        return self.qkv.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("heads of linear attention", self.sizes.heads)

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(super().of_rank(ranks), sizes=self.sizes.of_rank(ranks))


@dataclass(frozen=True)
class LinearRecurrence(Recurrent):
    """A gated linear recurrence after a convolution (RecurrentGemma). `heads`: the blocks of channels whose gates read
    the channels of their own block only.
    """

    inputs: Linear
    tensors: Tensors
    output: Linear
    sizes: LinearRecurrenceSizes
    heads: int

    @property
    def convolved(self) -> tuple[int, int]:
        return self.sizes.channels, self.sizes.width

    @property
    def state(self) -> tuple[int, ...]:
        return (self.sizes.channels,)

    def ops(self, dtype: str) -> Iterator[OpUse]:
        yield _convolution(self.sizes.channels, self.sizes.width)
        yield OpUse("gated_linear_recurrence", {"channels": self.sizes.channels})

    @property
    def is_divided(self) -> bool:
        return self.inputs.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("blocks of recurrent channels", self.heads)

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(super().of_rank(ranks), sizes=self.sizes.of_rank(ranks), heads=self.heads // ranks)


@dataclass(frozen=True)
class SelectiveScan(Recurrent):
    """A Mamba mixer. `parameters`: from convolved inputs to steps of a low rank, b and c, each of which has one of
    `norms`; () for none. `steps`: from these to the steps of channels.
    """

    inputs: Linear
    parameters: Linear
    norms: tuple[Norm, ...]
    steps: Linear
    tensors: Tensors
    output: Linear
    sizes: SelectiveScanSizes

    def parts(self) -> Iterator[tuple[str, Part]]:
        for part in (self.inputs, self.parameters, *self.norms, self.steps, self.tensors, self.output):
            yield part.name, part

    @property
    def convolved(self) -> tuple[int, int]:
        return self.sizes.channels, self.sizes.width

    @property
    def state(self) -> tuple[int, ...]:
        return self.sizes.channels, self.sizes.state_size

    def ops(self, dtype: str) -> Iterator[OpUse]:
        yield _convolution(self.sizes.channels, self.sizes.width)
        yield OpUse("selective_scan", self.sizes.op_sizes)

    @property
    def is_divided(self) -> bool:
        return self.inputs.split is not None

    def divided_sizes(self) -> Iterator[DividedSize]:
        yield DividedSize("channels of state-space layers", self.sizes.channels)

    def of_rank(self, ranks: int) -> Self:
        return dataclasses.replace(super().of_rank(ranks), sizes=self.sizes.of_rank(ranks))


WithStates: TypeAlias = ShortConvolution | DeltaNet | StateSpace | Lightning | LinearRecurrence | SelectiveScan


def _convolution(channels: int, width: int) -> OpUse:
    """The op of a causal convolution of each channel over time."""
    return OpUse(CONVOLUTION, {"channels": channels, "width": width})

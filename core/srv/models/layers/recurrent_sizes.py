"""What the plan of memory asks of recurrent layers, and the sizes of a state-space layer. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, Self

_FLOAT32 = 4  # bytes
_STATES_AT_ONCE = 5  # as it was, decayed, what is added, their sum, and all of them in one tensor
GATED_NORM = "gated_rms_norm"  # its name among the ops of a layer
_CHUNK = 64  # tokens whose products of b and c are computed at once


class RecurrentSizes(Protocol):
    """The sizes of a recurrent layer. `item`: bytes per element of the model's dtype.

    `of_rank(ranks)`: those of the part that each of several ranks has.
    """

    def step_bytes(self, item: int) -> int:
        """Bytes of temporary tensors per token, at most."""

    def row_bytes(self, item: int) -> int:
        """Bytes of temporary tensors per request of a step: its states, which the layer reads and computes anew."""


class ShortConvolutionSizes(NamedTuple):
    """A convolution over time of LFM2. `width`: tokens that it reads."""

    channels: int
    width: int

    def of_rank(self, ranks: int) -> Self:
        return self._replace(channels=self.channels // ranks)

    def step_bytes(self, item: int) -> int:
        """As `RecurrentSizes.step_bytes`: the projections, and taps in float32."""
        return self.channels * (6 * item + _FLOAT32 * (self.width + 4))

    def row_bytes(self, item: int) -> int:
        return _STATES_AT_ONCE * self.channels * self.width * item


class LinearRecurrenceSizes(NamedTuple):
    """A recurrence with one number per channel, after a convolution (RecurrentGemma)."""

    channels: int
    width: int

    def of_rank(self, ranks: int) -> Self:
        return self._replace(channels=self.channels // ranks)

    def step_bytes(self, item: int) -> int:
        """As `RecurrentSizes.step_bytes`: gates, decays, values and results in float32, and copies of a scan."""
        return ShortConvolutionSizes(self.channels, self.width).step_bytes(item) + _FLOAT32 * 12 * self.channels

    def row_bytes(self, item: int) -> int:
        convolution = ShortConvolutionSizes(self.channels, self.width).row_bytes(item)
        return convolution + _STATES_AT_ONCE * self.channels * _FLOAT32


class SelectiveScanSizes(NamedTuple):
    """Those of a Mamba layer. `width`: tokens that the convolution reads. `rank`: of the projection of steps.
    `conv_bias`: whether the convolution has a bias.
    """

    channels: int
    state_size: int
    width: int
    rank: int
    conv_bias: bool

    def of_rank(self, ranks: int) -> Self:
        return self._replace(channels=self.channels // ranks)

    @property
    def op_sizes(self) -> Mapping[str, int]:
        """Those by which the op `selective_scan` is selected."""
        return {"channels": self.channels, "state_size": self.state_size}

    def step_bytes(self, item: int) -> int:
        """As `RecurrentSizes.step_bytes`: projections and the convolution; steps, values and results in float32.

        The scan computes the factors and the states of 16 tokens at once, which is as much in a step of any length;
        a step of a thousand tokens has it.
        """
        projected = item * (5 * self.channels + 2 * (self.rank + 2 * self.state_size))
        convolution = ShortConvolutionSizes(self.channels, self.width).step_bytes(item)
        scanned = self.channels * (6 + self.state_size // 32 + 1)
        return projected + convolution + _FLOAT32 * scanned

    def row_bytes(self, item: int) -> int:
        convolution = ShortConvolutionSizes(self.channels, self.width).row_bytes(item)
        return convolution + _STATES_AT_ONCE * self.channels * self.state_size * _FLOAT32


class ScanSizes(NamedTuple):
    """The sizes of the op `state_space_scan`: heads, groups of heads with one b and c, and the two of a state."""

    heads: int
    groups: int
    head_dim: int
    state_size: int

    def of_rank(self, ranks: int) -> Self:
        """Groups are copied where there are fewer than ranks."""
        return self._replace(heads=self.heads // ranks, groups=max(1, self.groups // ranks))

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The elements of b, or of c, of one token."""
        return self.groups * self.state_size

    @property
    def op_sizes(self) -> Mapping[str, int]:
        return self._asdict()

    def step_bytes(self, item: int) -> int:
        """As `RecurrentSizes.step_bytes`: values before and after they are multiplied by steps, keys, the weights of a
        chunk, and results of a chunk and before it; projections are in the model's dtype."""
        scan = 5 * self.inner + 2 * self.keys + (self.groups + 3 * self.heads) * _CHUNK
        return item * 4 * (self.inner + self.keys) + _FLOAT32 * scan

    def row_bytes(self, item: int) -> int:
        return _STATES_AT_ONCE * self.inner * self.state_size * _FLOAT32


class StateSpaceSizes(NamedTuple):
    """Those of a Mamba-2 layer. `width`: tokens that the convolution reads. `conv_bias`, `bias`, `output_bias`: whether
    the convolution and the two projections have biases. `norm`: whether results are normalised, for each group of
    heads. `norm_first`: before they are multiplied by the gate, not after.
    """

    scan: ScanSizes
    width: int
    conv_bias: bool
    bias: bool
    output_bias: bool
    norm: bool = True
    norm_first: bool = False

    def of_rank(self, ranks: int) -> Self:
        return self._replace(scan=self.scan.of_rank(ranks))

    @property
    def channels(self) -> int:
        """Those of the convolution: values, b and c."""
        return self.scan.inner + 2 * self.scan.keys

    @property
    def inputs(self) -> int:
        """The rows of the projection of gates, channels and steps."""
        return self.scan.inner + self.channels + self.scan.heads

    def step_bytes(self, item: int) -> int:
        """As `RecurrentSizes.step_bytes`; the taps of the convolution are in float32."""
        convolution = _FLOAT32 * self.channels * (self.width + 4)
        return item * 2 * self.inputs + max(convolution, self.scan.step_bytes(item))

    def row_bytes(self, item: int) -> int:
        return self.scan.row_bytes(item) + _STATES_AT_ONCE * self.channels * self.width * item

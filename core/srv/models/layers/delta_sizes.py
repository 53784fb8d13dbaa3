"""The sizes of a layer with the gated delta rule, as data. Torch-free: `srv plan` reads them."""

from __future__ import annotations

from typing import NamedTuple, Self

from srv.models.checkpoints.slices import Section, Sections

_FLOAT32 = 4  # bytes
_STATES_AT_ONCE = 5  # as it was, decayed, what is added, their sum, and all of them in one tensor


class DeltaSizes(NamedTuple):
    """Heads of queries and keys, heads of values, and the sizes of both; `width`: tokens that the convolution reads.

    `by_heads`: in checkpoints, the rows of one matrix are queries, keys, values and gates of one key head after the
    other (Qwen3-Next); otherwise each has a matrix of its own, or shares one with those of all heads after it.
    `apart`: each of them has a matrix of its own, and so has the convolution of each (OLMo Hybrid). `negative`: rates
    are between 0 and 2 in place of 0 and 1, so that a state may change its sign. `tiled`: the matrix of results reads
    the value heads of each key head in turns, the first of all of them first (GGUF files of Qwen3.5).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    by_heads: bool = True
    apart: bool = False
    negative: bool = False
    tiled: bool = False

    def of_rank(self, ranks: int) -> Self:
        """Those of the part that each of several ranks has: whole key heads, with their value heads."""
        return self._replace(key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Those of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def inputs(self) -> tuple[dict[str, int], dict[str, int]]:
        """The rows of the matrices of queries, keys, values and gates, and of rates and decays, by their names.

        Quantized checkpoints often leave the latter unquantized, so that they are not fused with the others.
        """
        if self.apart:
            heads = {"b_proj": self.value_heads, "a_proj": self.value_heads}
            return {"q_proj": self.keys, "k_proj": self.keys, "v_proj": self.values, "g_proj": self.values}, heads
        if self.by_heads:
            return {"in_proj_qkvz": self.channels + self.values}, {"in_proj_ba": 2 * self.value_heads}
        heads = {"in_proj_b": self.value_heads, "in_proj_a": self.value_heads}
        return {"in_proj_qkv": self.channels, "in_proj_z": self.values}, heads

    @property
    def input_sections(self) -> tuple[tuple[Sections, ...], tuple[Sections, ...]]:
        """The sections of each of `inputs` that ranks divide: each rank has the rows of its heads."""
        channels = {"in_proj_qkv": self.channel_sections}
        rows, heads = self.inputs
        return tuple(channels.get(name, (Section(size),)) for name, size in rows.items()), tuple(
            (Section(size),) for size in heads.values()
        )

    @property
    def channel_sections(self) -> Sections:
        """Those of the convolution's channels, where all are in one tensor."""
        return Section(self.keys), Section(self.keys), Section(self.values)

    @property
    def output_sections(self) -> Sections:
        """Those of the columns of the matrix of results."""
        if not self.tiled:
            return (Section(self.values),)
        return (Section(self.key_heads * self.value_dim),) * (self.value_heads // self.key_heads)

    @property
    def output(self) -> str:
        """The name of the matrix of results."""
        return "o_proj" if self.apart else "out_proj"

    @property
    def convolutions(self) -> dict[str, int]:
        """The channels of the convolution by the names of its weights."""
        if self.apart:
            return {"q_conv1d": self.keys, "k_conv1d": self.keys, "v_conv1d": self.values}
        return {"conv1d": self.channels}

    def step_bytes(self, item: int) -> int:
        """Bytes of temporary tensors per token, at most; `item`: bytes per element of the model's dtype.

        Projections and their parts are in that dtype; the taps of the convolution are in float32, and after them
        queries, keys (repeated for each value head), values and results.
        """
        convolution = self.channels * (self.width + 4)
        rule = 4 * self.keys + 4 * self.value_heads * self.key_dim + 4 * self.values
        return item * 3 * (self.channels + self.values + self.value_heads) + _FLOAT32 * max(convolution, rule)

    def row_bytes(self, item: int) -> int:
        """Bytes of temporary tensors per request of a step: its states, which the layer reads and computes anew."""
        state, convolution = self.value_heads * self.key_dim * self.value_dim, self.channels * self.width
        return _STATES_AT_ONCE * (state * _FLOAT32 + convolution * item)

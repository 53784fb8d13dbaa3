"""Counter-based noise: the uniform number of a token is a pure function of (seed, position).

Owns the generator, in NumPy on the host, and two small per-slot caches of its output: on the host, and on the device
for positions that only the device knows. Must not know requests or batches. The reasons are in
docs/adr/0004-counter-based-noise.md.

The generator is Philox4x32 with ten rounds: John K. Salmon, Mark A. Moraes, Ron O. Dror and David E. Shaw,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from srv.platform.transfers import Transfers

Words = npt.NDArray[np.uint64]  # 32-bit words, in 64-bit integers, so that products keep their upper half
Floats = npt.NDArray[np.float64]

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: Words, key: Words) -> Words:
    """Philox4x32-10 of n independent counters.

    counter: uint64 [4, n], key: uint64 [2, n], every entry below 2**32. Returns uint64 [4, n] in the same range.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(_ROUNDS):
        turn_key_0 = (k0 + np.uint64(turn * _WEYL_0)) & _LOW
        turn_key_1 = (k1 + np.uint64(turn * _WEYL_1)) & _LOW
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ turn_key_0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ turn_key_1,
            product_0 & _LOW,
        )
    return np.stack((c0, c1, c2, c3))


def uniform(seeds: Sequence[int] | npt.NDArray[np.int64], positions: Sequence[int] | npt.NDArray[np.int64]) -> Floats:
    """float64 [n] in [0, 1), 53 random bits each; entry i depends only on (seeds[i], positions[i]).

    seeds and positions: equally many integers in [0, 2**63). The seed is the key and the position the
    lower half of the counter, so two positions of one seed never share a block of the generator.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        np.stack((position & _LOW, position >> _HALF, zero, zero)), np.stack((seed & _LOW, seed >> _HALF))
    )
    bits = ((words[1] << _HALF) | words[0]) >> np.uint64(11)
    numbers: Floats = bits.astype(np.float64) * 2.0**-53
    return numbers


class SlotNoise:
    """`uniform` with a cache per slot for the next positions.

    The cost of the generator is that of about a hundred NumPy calls, for any count of numbers, so one call generates
    the noise of 64 positions. The values are exactly those of `uniform`.
    """

    _POSITIONS = 64

    def __init__(self, max_slots: int) -> None:
        self._values = np.zeros((max_slots, self._POSITIONS), dtype=np.float64)
        self._block = np.full(max_slots, -1, dtype=np.int64)
        self._seed = np.full(max_slots, -1, dtype=np.int64)

    def draw(
        self, slots: npt.NDArray[np.int64], seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> Floats:
        """float64 [n], equal to `uniform(seeds, positions)`. All are int64 [n], and each slot occurs once."""
        blocks = positions // self._POSITIONS
        stale = (self._block[slots] != blocks) | (self._seed[slots] != seeds)
        if stale.any():
            self._fill(slots[stale], seeds[stale], blocks[stale])
        values: Floats = self._values[slots, positions % self._POSITIONS]
        return values

    def _fill(self, slots: npt.NDArray[np.int64], seeds: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        positions = blocks[:, None] * self._POSITIONS + np.arange(self._POSITIONS)
        values = uniform(np.repeat(seeds, self._POSITIONS), positions.ravel())
        self._values[slots] = values.reshape(positions.shape)
        self._block[slots], self._seed[slots] = blocks, seeds


class DeviceNoise:
    """`uniform` for positions on the device, of which the host knows only a range.

    A ring of blocks per slot: position p is in column p % (blocks x 64). The host generates the blocks of a range when
    it first sees them, which is once per 64 positions and slot; the device looks the position up.
    """

    _POSITIONS = 64
    _BLOCKS = 4

    def __init__(self, max_slots: int, transfers: Transfers) -> None:
        self._transfers = transfers
        width = self._BLOCKS * self._POSITIONS
        self._values = torch.zeros((max_slots, width), dtype=torch.float64, device=transfers.device)
        self._block = np.full((max_slots, self._BLOCKS), -1, dtype=np.int64)
        self._seed = np.full((max_slots, self._BLOCKS), -1, dtype=np.int64)

    def draw(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """float64 [n] on the device; slots and positions: int64 [n]. Call `ensure` before."""
        return self._values[slots, positions % self._values.shape[1]]

    def ensure(self, slots: Sequence[int], seeds: Sequence[int], first: Sequence[int], last: Sequence[int]) -> None:
        """Have the noise of positions first[i] to last[i] of slots[i], which are less than 128 apart."""
        for slot, seed, begin, end in zip(slots, seeds, first, last, strict=True):
            for block in range(begin // self._POSITIONS, end // self._POSITIONS + 1):
                place = block % self._BLOCKS
                if self._block[slot, place] != block or self._seed[slot, place] != seed:
                    self._fill(slot, seed, block, place)

    def _fill(self, slot: int, seed: int, block: int, place: int) -> None:
        positions = block * self._POSITIONS + np.arange(self._POSITIONS)
        values = torch.from_numpy(uniform(np.full(self._POSITIONS, seed), positions))
        self._transfers.update(self._values[slot, place * self._POSITIONS : (place + 1) * self._POSITIONS], values)
        self._block[slot, place], self._seed[slot, place] = block, seed

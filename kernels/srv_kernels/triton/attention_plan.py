"""Launch sizes of paged attention from host facts: grids, splits, workspaces. Imports neither Triton nor torch.

Everything here depends on the shape of a step and not on the lengths of its rows, which the kernels read on the device;
so a captured launch serves every step of its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from srv_kernels.triton.attention_tuning import MOST_SPLITS, PROGRAMS, SPLIT_TOKENS, Blocks, blocks

LARGEST_TILE = 128  # query heads per KV head, at most


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer on one rank; dims in elements. `item_size`: bytes per element of the queries."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    item_size: int

    def reasons(self) -> list[str]:
        """Why paged attention cannot compute such a layer, as clauses; [] if it can."""
        reasons = []
        if self.heads % self.kv_heads:
            reasons.append(f"{self.heads} heads are no multiple of {self.kv_heads} KV heads")
        if self.heads // self.kv_heads > LARGEST_TILE:
            reasons.append(f"{self.heads // self.kv_heads} query heads share a KV head, more than {LARGEST_TILE}")
        if max(self.key_dim, self.value_dim) > 256:
            reasons.append(f"heads have {max(self.key_dim, self.value_dim)} elements, more than 256")
        return reasons

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How `paged_decode` is launched. `queries`: the most query tokens of a row.

    `splits`: the most parts into which a row's keys are divided. `least_blocks`: the blocks of keys that one has at
    least.
    """

    queries: int
    splits: int
    least_blocks: int
    blocks: Blocks

    def partial_shape(self, rows: int, heads: Heads) -> tuple[int, ...]:
        """Shape of the float32 workspace `partial` for up to `rows` rows; that of `logs` lacks the last axis."""
        return rows * self.queries, heads.heads, self.splits, heads.value_dim


def extend_blocks(heads: Heads, target: str) -> Blocks:
    """The block sizes of `paged_extend`. Raises ValueError if `heads` has `reasons`."""
    sizes = blocks(target, "extend", max(heads.key_dim, heads.value_dim), heads.item_size)
    return sizes._replace(rows=tile_rows(heads.group, sizes.rows, sizes.rows))


@dataclass(frozen=True, slots=True)
class Splits:
    """What an operator asks for. `most`: at most so many splits; None: `MOST_SPLITS`.

    `tokens`: every split has so many, rounded up to whole blocks, and `most` does not matter. A row's result then has
    the same bits in any step with as many query tokens per row, whatever its other rows.
    """

    most: int | None = None
    tokens: int | None = None


def plan_decode(
    heads: Heads,
    rows: int,
    queries: int,
    longest: int,
    target: str,
    compute_units: int,
    splits: Splits = Splits(),
) -> DecodePlan:
    """The launch of `paged_decode` for `rows` rows of up to `queries` query tokens.

    `longest`: the most keys that a row attends to (its length or the window); for a captured shape, what the context
    length allows. Unless `splits` fixes their size, there are as many splits as fill the device's `compute_units`
    (streaming multiprocessors). A row shorter than `longest` is divided into equal parts as well, but no part is
    shorter than `SPLIT_TOKENS`.
    Raises ValueError if `heads` has `reasons`.
    """
    sizes = blocks(target, "decode", max(heads.key_dim, heads.value_dim), heads.item_size)
    rows_of_tile = tile_rows(heads.group, queries * heads.group, sizes.rows)
    sizes = sizes._replace(rows=rows_of_tile, warps=sizes.warps * (2 if rows_of_tile > 32 else 1))
    programs = max(1, rows) * heads.kv_heads * tiles(queries, heads.group, sizes)
    if splits.tokens is not None:
        blocks_of_split = -(-splits.tokens // sizes.keys)
        # The first query of a row sees up to `queries - 1` keys more than `longest`; a window may begin in a block.
        most_blocks = -(-(longest + queries - 1) // sizes.keys) + 1
        return DecodePlan(queries, -(-most_blocks // blocks_of_split), blocks_of_split, sizes)
    split_count = min(
        round(PROGRAMS * compute_units / programs), -(-longest // SPLIT_TOKENS), splits.most or MOST_SPLITS
    )
    return DecodePlan(queries, max(1, split_count), max(1, SPLIT_TOKENS // sizes.keys), sizes)


def tile_rows(group: int, rows: int, most: int) -> int:
    """The rows of a tile: a power of two of at least 16, which Triton's products need, and `group`; at most `most`."""
    return max(16, _power(group), min(_power(rows), most))


def tiles(queries: int, group: int, sizes: Sequence[int]) -> int:
    """The tiles of a row with `queries` query tokens."""
    return -(-queries // (sizes[0] // group))


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()

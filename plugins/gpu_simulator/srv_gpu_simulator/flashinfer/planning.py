"""What `plan` decides and refuses: kernels that exist, and the workspace that they need.

Sizes of workspaces follow FlashInfer's scheduler: with split KV, each tile of queries has a partial result per head. In
graph mode the largest number of tiles counts, whatever the lengths are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from srv_gpu_simulator.cards import Card
from srv_gpu_simulator.checks import FP8, HALVES, Rules

# (keys, values) for which kernels are compiled.
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
# Query heads per KV head of the decode kernel without tensor cores.
DECODE_GROUPS = (1, 2, 3, 4, 8)
BACKENDS = ("auto", "fa2", "fa3")

_BLOCKS_PER_PROCESSOR = 2
_SPLIT_FROM = 128  # keys; a shorter sequence is never split
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem of one plan. queries: per sequence. window_left: -1 for none."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    output_dtype: torch.dtype
    scale: float | None
    causal: bool
    window_left: int
    soft_cap: float
    backend: str
    tensor_cores: bool
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.queries)

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


def dtype_of(value: str | torch.dtype) -> torch.dtype:
    """A dtype given as such or by name."""
    dtype = getattr(torch, value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{value!r} is no dtype")
    return dtype


def check_problem(rules: Rules, problem: Problem, card: Card) -> None:
    """Refuse a problem for which FlashInfer has no kernel."""
    group = rules.heads(problem.query_heads, problem.kv_heads)
    dims = (problem.key_dim, problem.value_dim)
    rule = f"must be one of {', '.join(map(str, HEAD_DIMS))} (keys, values)"
    rules.require(dims in HEAD_DIMS, "head_dim", dims, rule, RuntimeError)
    rules.require(problem.page_size >= 1, "page_size", problem.page_size, "must be at least 1")
    rules.dtype("q_data_type", problem.query_dtype, HALVES)
    rules.dtype("kv_data_type", problem.kv_dtype, (problem.query_dtype, *FP8))
    rules.dtype("o_data_type", problem.output_dtype, HALVES)
    rules.require(problem.window_left >= -1, "window_left", problem.window_left, "must be -1 (none) or more")
    rules.require(problem.soft_cap >= 0, "logits_soft_cap", problem.soft_cap, "must be 0 (none) or more")
    if not problem.tensor_cores:
        rule = f"the decode kernel has {DECODE_GROUPS} query heads per KV head; pass use_tensor_cores=True"
        rules.require(group in DECODE_GROUPS, "num_qo_heads", f"{group} times the KV heads", rule, RuntimeError)
    if problem.backend == "fa3":
        rules.require(card.key == "sm90", "backend", "'fa3'", f"which has kernels for sm90 only, not {card.key}")
        rules.require(problem.kv_dtype not in FP8, "backend", "'fa3'", "which reads a cache in the dtype of queries")


def workspace_bytes(problem: Problem, card: Card, fixed_rows: int | None, split: bool) -> int:
    """The part of the float workspace that the kernels use. fixed_rows: the rows of a graph, None without one."""
    if problem.backend == "fa3" or not split or not problem.queries:
        return 0
    largest = card.processors * _BLOCKS_PER_PROCESSOR // problem.kv_heads
    if not problem.tensor_cores:
        partial = max(largest, len(problem.queries))
        used = fixed_rows is not None or max(problem.keys) > _SPLIT_FROM
        return problem.query_heads * partial * (problem.value_dim + 1) * _FLOAT if used else 0
    batch, group = len(problem.queries), problem.group
    if fixed_rows is not None:
        tile = _tile((fixed_rows - batch + 1) * group, problem.value_dim)
        tiles = -(-fixed_rows * group // tile) + batch - 1
        partial = max(largest, tiles)
    else:
        tile = _tile(problem.rows * group // batch, problem.value_dim)
        tiles = sum(-(-queries * group // tile) for queries in problem.queries)
        if tiles >= largest or max(problem.keys) <= _SPLIT_FROM:
            return 0
        partial = largest
    return problem.query_heads * partial * tile * (problem.value_dim + 1) * _FLOAT


def _tile(packed_rows: int, value_dim: int) -> int:
    """Rows (query tokens times heads per KV head) of one tile."""
    if packed_rows > 64 and value_dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def schedule(problem: Problem) -> list[int]:
    """What `plan` uploads for the kernels: the number of sequences, then their queries and keys."""
    return [len(problem.queries), *problem.queries, *problem.keys]


def scheduled(numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The queries and keys of an uploaded schedule."""
    batch = numbers[0]
    return tuple(numbers[1 : 1 + batch]), tuple(numbers[1 + batch : 1 + 2 * batch])

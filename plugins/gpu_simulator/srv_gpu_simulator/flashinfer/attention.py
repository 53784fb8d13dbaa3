"""What the wrappers for paged attention share: buffers, the upload of a plan, and the kernel.

    plan   host: rules, schedule ─> pinned memory ─> device     index arrays ─> device (fixed buffers in graph mode)
    run    device: reads the schedule, the index arrays, queries and the cache

The pinned memory belongs to the wrapper, and the copy from it is asynchronous. As in FlashInfer, a second `plan`
overwrites it although the first copy may not have been executed: then a kernel gets the wrong schedule, which is an
error here. Use one wrapper per step in flight, or wait.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from srv_gpu_simulator.checks import Rules
from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.flashinfer.planning import (
    BACKENDS,
    Problem,
    check_problem,
    schedule,
    scheduled,
    workspace_bytes,
)
from srv_gpu_simulator.paged_attention import Pages, Scores, attend

LAYOUTS = ("NHD", "HND")
_INT_WORKSPACE = 8 << 20  # bytes
_LOG_2 = 0.6931471805599453

Cache = Tensor | tuple[Tensor, Tensor]


def unpack_cache(rules: Rules, cache: Cache, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values as [pages, page_size, KV heads, D], whatever the layout and form."""
    if isinstance(cache, Tensor):
        rules.dims("paged_kv_cache", cache, 4, 5)
        rules.require(
            cache.shape[1] == 2, "paged_kv_cache", f"of shape {tuple(cache.shape)}", "must be [pages, 2, ...]"
        )
        parts = [cache[:, 0], cache[:, 1]]
    else:
        rules.require(isinstance(cache, tuple), "paged_kv_cache", type(cache).__name__, "must be a tensor or a tuple")
        parts = list(cache)
    for name, part in zip(("paged_k_cache", "paged_v_cache"), parts, strict=True):
        rules.on_device(**{name: part})
        rules.dims(name, part, 3, 4)
        rules.unit_stride(**{name: part})
    axis = 1 if layout == "NHD" else 2
    key, value = (part.unsqueeze(axis) if part.dim() == 3 else part for part in parts)
    strides = f"of strides {value.stride()}"
    same = key.stride() == value.stride() or key.shape[-1] != value.shape[-1]
    rules.require(same, "paged_v_cache", strides, f"must have those of the keys, {key.stride()}", RuntimeError)
    return (key, value) if layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))


class PagedWrapper:
    """The common part of a wrapper. Subclasses name the arguments of `plan`."""

    kind = ""

    def __init__(
        self,
        accelerator: Accelerator,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        buffers: dict[str, Tensor | None],
    ) -> None:
        """buffers: the fixed buffers of graph mode by argument, without their suffix "_buf" or "_buffer"."""
        self._accelerator = accelerator
        rules = self._rules("__init__")
        rules.on_device(float_workspace_buffer=float_workspace_buffer)
        rules.require(kv_layout in LAYOUTS, "kv_layout", repr(kv_layout), "must be 'NHD' or 'HND'", KeyError)
        rules.require(backend in BACKENDS, "backend", repr(backend), f"the simulator has {', '.join(BACKENDS)}")
        self._layout = kv_layout
        self._backend = backend
        self._workspace = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._graph_mode = use_cuda_graph
        self._buffers: dict[str, Tensor] = {}
        if use_cuda_graph:
            for name, buffer in buffers.items():
                is_tensor = isinstance(buffer, Tensor)
                rules.require(is_tensor, name, "not given", "must be a tensor with use_cuda_graph")
                rules.on_device(**{name: buffer})
                rules.int32(**{name: buffer})
                assert buffer is not None
                self._buffers[name] = buffer
            self._batch = len(self._buffers["paged_kv_last_page_len"])
            for name in ("qo_indptr", "paged_kv_indptr"):
                if name in self._buffers:
                    rules.shape(name, self._buffers[name], (self._batch + 1,))
        self._int_workspace = torch.empty(_INT_WORKSPACE // 4, dtype=torch.int32, device=self.device)
        self._pinned = accelerator.pinned((_INT_WORKSPACE // 4,), torch.int32)
        self._problem: Problem | None = None
        self._most_rows: int | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph_mode

    def _rules(self, function: str) -> Rules:
        return Rules(f"{self.kind}.{function}")

    # Plan

    def _begin_plan(self, arrays: dict[str, Tensor]) -> dict[str, list[int]]:
        """Check the index arrays, and return those that the host must read; a device tensor waits for the device."""
        rules = self._rules("plan")
        self._accelerator.recorder.refuse(f"{self.kind}.plan", "plan before the capture, and before each replay")
        rules.int32(**arrays)
        return {name: array.cpu().tolist() for name, array in arrays.items() if name != "paged_kv_indices"}

    def _end_plan(self, problem: Problem, arrays: dict[str, Tensor], non_blocking: bool, split: bool) -> None:
        """Check the problem, and upload its schedule and index arrays."""
        rules = self._rules("plan")
        card = self._accelerator.card
        check_problem(rules, problem, card)
        if self._graph_mode:
            self._check_fixed(rules, problem, len(arrays["paged_kv_indices"]))
        needed = workspace_bytes(problem, card, self._most_rows if self._graph_mode else None, split)
        described = f"of {self._workspace.nbytes} bytes"
        rule = f"this plan needs {needed}; increase the workspace (128 MiB are recommended)"
        fits = self._workspace.nbytes >= needed
        rules.require(fits, "float_workspace_buffer", described, rule, RuntimeError)
        numbers = schedule(problem)
        rules.require(
            len(numbers) <= len(self._pinned), "batch", len(problem.queries), "is too large for the workspace"
        )
        self._pinned[: len(numbers)] = torch.tensor(numbers, dtype=torch.int32)
        self._int_workspace[: len(numbers)].copy_(self._pinned[: len(numbers)], non_blocking=True)
        for name, array in arrays.items():
            if not self._graph_mode:
                self._buffers[name] = array.to(self.device, non_blocking=non_blocking)
                continue
            late = non_blocking and (name != "paged_kv_indices" or array.device == self.device)
            self._buffers[name][: len(array)].copy_(array, non_blocking=late)
        self._problem = problem

    def _check_fixed(self, rules: Rules, problem: Problem, indices: int) -> None:
        """Refuse what a graph cannot change: the batch size, more rows, more pages than the buffer has."""
        batch, room = len(problem.queries), len(self._buffers["paged_kv_indices"])
        rule = f"the fixed batch size of this wrapper is {self._batch}"
        rules.require(batch == self._batch, "batch size", batch, rule)
        rules.require(indices <= room, "paged_kv_indices", f"of {indices} entries", f"its buffer has {room}")
        if self._most_rows is None:
            self._most_rows = problem.rows
        rule = f"the first plan of this wrapper had {self._most_rows}, and a graph cannot have more"
        rules.require(problem.rows <= self._most_rows, "rows", problem.rows, rule)

    # Run

    def _run(
        self,
        query: Tensor,
        cache: Cache,
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        window_left: int | None,
    ) -> Any:
        rules = self._rules("run")
        if self._problem is None:
            raise RuntimeError(f"{rules.function}: plan() was not called; it must come before run()")
        problem = self._problem
        if self._accelerator.capture is not None and not self._graph_mode:
            raise RuntimeError(
                f"{rules.function}: a graph is being captured, but this wrapper was created without use_cuda_graph: "
                "its next plan() would replace the index arrays that the graph reads"
            )
        key, value = unpack_cache(rules, cache, self._layout)
        self._check_run(rules, problem, query, key, value, window_left)
        rows, heads = query.shape[:2]
        shape = (rows, heads, problem.value_dim)
        if out is None:
            out = torch.empty(shape, dtype=problem.output_dtype, device=self.device)
        rules.on_device(out=out, lse=lse)
        rules.shape("out", out, shape)
        rules.dtype("out", out.dtype, (problem.output_dtype,))
        if return_lse:
            lse = lse if lse is not None else torch.empty((rows, heads), dtype=torch.float32, device=self.device)
            rules.shape("lse", lse, (rows, heads))
            rules.dtype("lse", lse.dtype, (torch.float32,))
        scale = (problem.scale or problem.key_dim**-0.5) * (q_scale or 1.0) * (k_scale or 1.0)
        scores = Scores(scale, problem.window_left, 0 if problem.causal else -1, problem.soft_cap)
        arguments = (query, key, value, out, lse if return_lse else None)
        self._accelerator.launch(
            f"flashinfer.{self.kind}",
            _attend_paged,
            rules.function,
            self._int_workspace,
            list(self._buffers.items()),
            arguments,
            (problem.page_size, scores, 1.0 if v_scale is None else v_scale),
        )
        return (out, lse) if return_lse else out

    def _check_run(
        self, rules: Rules, problem: Problem, query: Tensor, key: Tensor, value: Tensor, window_left: int | None
    ) -> None:
        rules.on_device(q=query)
        rules.dims("q", query, 3)
        rules.unit_stride(q=query)
        rules.dtype("q", query.dtype, (problem.query_dtype,))
        rules.shape("q", query, (problem.rows, problem.query_heads, problem.key_dim))
        for name, part, dim in (("paged_k_cache", key, problem.key_dim), ("paged_v_cache", value, problem.value_dim)):
            rules.dtype(name, part.dtype, (problem.kv_dtype,))
            rules.shape(name, part, (key.shape[0], problem.page_size, problem.kv_heads, dim))
        planned = problem.window_left
        same = window_left is None or window_left == planned
        rules.require(same, "window_left", window_left, f"must be that of plan(), {planned}", AssertionError)


def _attend_paged(
    function: str, workspace: Tensor, buffers: Any, tensors: Any, options: tuple[int, Scores, float]
) -> None:
    """The kernel. Rows of `out` that the plan does not cover keep their values."""
    query, key, value, out, lse = tensors
    page_size, scores, v_scale = options
    arrays = dict(buffers)
    batch = int(workspace[0])
    queries, keys = scheduled(workspace[: 1 + 2 * max(batch, 0)].tolist())
    pages = Pages(
        arrays["paged_kv_indptr"][: batch + 1], arrays["paged_kv_indices"], arrays["paged_kv_last_page_len"], page_size
    )
    ends = arrays["qo_indptr"][: batch + 1].tolist() if "qo_indptr" in arrays else _ends(queries)
    lengths = pages.lengths()
    planned_queries = tuple(end - start for start, end in pairwise(ends))
    if (planned_queries, tuple(lengths)) != (queries, keys):
        raise RuntimeError(
            f"{function}: the plan is for {list(queries)} queries and {list(keys)} keys, but the index arrays on the "
            f"device say {list(planned_queries)} and {lengths}: plan() was not called for these arrays, or a"
            " later plan() "
            "overwrote the schedule before it was copied"
        )
    for row, length in enumerate(lengths):
        at = slice(ends[row], ends[row + 1])
        attended, sums = attend(query[at], pages.gather(key, row, length), pages.gather(value, row, length), scores)
        out[at] = (attended * v_scale).to(out.dtype)
        if lse is not None:
            lse[at] = sums / _LOG_2


def _ends(queries: tuple[int, ...]) -> list[int]:
    ends = [0]
    for count in queries:
        ends.append(ends[-1] + count)
    return ends

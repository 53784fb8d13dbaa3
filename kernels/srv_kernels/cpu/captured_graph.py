"""Graphs of native kernel calls: a step is captured once and replayed from C++, without Python or torch in between.

    with CapturedGraph(pool) as graph:
        ...         native_ops, native_linear, views, new tensors, and a few operators of torch
    graph.replay()  the same work on the same storages, with their current contents

During capture the library stores native calls with their addresses and does not run them. New tensors therefore come
from a memory pool that outlives the capture, and constants must outlive the graph. Operators of torch run during
capture, on zeros in place of the results of native calls, and are replayed between the native calls. An operator cannot
be captured if it fails on zeros, reads a value back into Python, or has a data-dependent output shape. Capture
does not see `tolist`, `numpy` or assignments to attributes: a step must not use them, since replay would not repeat
them.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from srv_kernels.cpu.library import load

_ALIGNMENT = 64  # a cache line
_ALLOCATE = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)
_PROFILER = "profiler"  # of operators that mark a range: they mark the capture, and are not part of the graph


class NotCapturable(Exception):
    """The work contains an operator that cannot be captured; the message names it."""


class GraphMemoryPool:
    """Memory for the tensors of captured work. A free block is reused for the next tensor that fits in it.

    Graphs may share a pool if they never run at the same time: no data is kept between replays.
    """

    def __init__(self) -> None:
        self._released: deque[npt.NDArray[np.uint8]] = deque()  # appended to by finalizers, at any time
        self._free: list[tuple[int, int, npt.NDArray[np.uint8]]] = []  # (size, tie-breaker, block)
        self._tie_breakers = count()
        self.bytes = 0

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros of the same shape, strides and dtype."""
        block = self._allocate_block(max(tensor.untyped_storage().nbytes(), tensor.itemsize))
        used = block[:]  # collected with the tensor's storage
        used.fill(0)
        weakref.finalize(used, self._released.append, block).atexit = False
        flat = torch.from_numpy(used).view(tensor.dtype)
        return torch.as_strided(flat, tensor.shape, tensor.stride())

    def _allocate_block(self, size: int) -> npt.NDArray[np.uint8]:
        while self._released:
            block = self._released.popleft()
            insort(self._free, (block.nbytes, next(self._tie_breakers), block))
        for index, (available, _, block) in enumerate(self._free):
            if available >= size:
                del self._free[index]
                return block
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.bytes += size
        memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return memory[begin : begin + size]


class CapturedGraph(TorchDispatchMode):
    """Captures this thread's work while it is entered; `replay` computes the results.

    The caller must keep alive all tensors that the graph reads and writes.
    """

    def __init__(self, pool: GraphMemoryPool) -> None:
        super().__init__()
        library = load().library
        if library is None:
            raise RuntimeError(f"nothing can be captured: {load().reason}")
        self._library, self._pool = library, pool
        self._calls: list[Callable[[], object]] = []
        self._native: int | None = None
        self.native_calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would make torch import its compiler, which takes over a second; nothing is compiled."""
        return False

    @property
    def torch_calls(self) -> int:
        """The number of captured torch operators."""
        return sum(
            not (isinstance(part, partial) and part.func is self._library.srv_graph_replay) for part in self._calls
        )

    def replay(self) -> None:
        """Runs the captured work in order; call it in inference mode if it was captured in inference mode."""
        for part in self._calls:
            part()

    def __enter__(self) -> CapturedGraph:
        self._begin()
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._end()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == _PROFILER:
            return func(*args, **kwargs)
        if func in _ALLOCATE:
            return self._pool.zeros_like(func(*args, **kwargs))
        if torch.Tag.dynamic_output_shape in func.tags and not _is_integer_indexing(func, args):
            raise NotCapturable(f"the output shape of {func} depends on values that change from step to step")
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            raise NotCapturable(
                f"{func} fails during capture, when its inputs are not computed yet: {error}"
            ) from error
        if func.is_view and isinstance(result, Tensor) and _address(result) == _address(args[0]):
            return result  # fast path, since most operators are views
        leaves = [leaf for leaf in tree_leaves(result) if leaf is not None]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise NotCapturable(f"{func} reads a value of a tensor; every replay would reuse the captured value")
        inputs = _storages(tree_leaves((args, kwargs)))
        is_fresh = [_address(leaf) not in inputs for leaf in leaves]
        if any(is_fresh) or not leaves or func._schema.is_mutable:
            self._add(partial(_rerun, func, args, kwargs, leaves, is_fresh))
        return result

    def _add(self, call: Callable[[], object]) -> None:
        self._end()
        self._calls.append(call)
        self._begin()

    def _begin(self) -> None:
        self._native = self._library.srv_graph_capture_begin()
        if self._native is None:
            raise RuntimeError("this thread is capturing already: graphs do not nest")

    def _end(self) -> None:
        native, self._native = self._native, None
        calls = self._library.srv_graph_capture_end()
        self.native_calls += calls
        if calls:
            self._calls.append(partial(self._library.srv_graph_replay, native))
            weakref.finalize(self, self._library.srv_graph_free, native).atexit = False
        else:
            self._library.srv_graph_free(native)


def _rerun(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Tensor],
    is_fresh: Sequence[bool],
) -> None:
    """Runs an operator again, and copies its new results to the addresses that they had during capture."""
    rerun = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if leaf is not None]
    for captured, result, is_new in zip(results, rerun, is_fresh, strict=True):
        if is_new:
            captured.copy_(result)


def _is_integer_indexing(func: Any, args: Sequence[Any]) -> bool:
    """Whether `func` indexes without a mask: the output shape then depends on the shapes of the indices alone."""
    return func is torch.ops.aten.index.Tensor and all(
        index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1]
    )


def _storages(leaves: Sequence[Any]) -> set[int]:
    return {_address(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


def _address(tensor: Tensor) -> int:
    """The address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()

"""A step's work, recorded once and run many times: native kernels from C++, without Python or torch between them.

    with CapturedGraph(pool) as graph:
        ...         native_ops, native_products, views, new tensors, and a few operators of torch
    graph.replay()  the same work on the same storages, with their current contents

Native calls are kept by the library, by their addresses, and not run; so tensors that the recorded code makes come from
an pool, which stays, and constants must outlive the graph. Operators of torch that compute are run and kept as they
are, between the native calls: during capture they see zeros for what native calls will make. Those that cannot work
with zeros, that read a number of a tensor back into Python, or whose result's size depends on numbers, cannot be
recorded. (`tolist`, `numpy` and attributes that are bound anew pass by unseen: layers must not use them in a step.)
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


class NotCapturable(Exception):
    """The work reads what a graph cannot follow; the text names the operator."""


class GraphMemoryPool:
    """Memory for tensors of recorded work. A block that no tensor uses any more serves the next that it is enough for.

    Tapes that are never run at the same time may share one, as none keeps anything for the next.
    """

    def __init__(self) -> None:
        self._given_back: deque[npt.NDArray[np.uint8]] = deque()  # by finalizers, at any time
        self._free: list[tuple[int, int, npt.NDArray[np.uint8]]] = []  # (size, a number that orders equals, block)
        self._numbers = count()
        self.bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Zeros of the same shape, strides and dtype."""
        block = self._take(max(tensor.untyped_storage().nbytes(), tensor.itemsize))
        used = block[:]  # dies with the tensor's storage
        used.fill(0)
        weakref.finalize(used, self._given_back.append, block).atexit = False
        flat = torch.from_numpy(used).view(tensor.dtype)
        return torch.as_strided(flat, tensor.shape, tensor.stride())

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        while self._given_back:
            block = self._given_back.popleft()
            insort(self._free, (block.nbytes, next(self._numbers), block))
        for index, (found, _, block) in enumerate(self._free):
            if found >= size:
                del self._free[index]
                return block
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.bytes += size
        memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return memory[begin : begin + size]


class CapturedGraph(TorchDispatchMode):
    """Records while it is entered, on this thread; what it made then is computed by `run`.

    Whoever keeps a graph keeps what it reads and writes.
    """

    def __init__(self, pool: GraphMemoryPool) -> None:
        super().__init__()
        library = load().library
        if library is None:
            raise RuntimeError(f"there is nothing to record: {load().reason}")
        self._library, self._pool = library, pool
        self._parts: list[Callable[[], object]] = []
        self._native: int | None = None
        self.native_calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: no step is compiled, and keeping torch's compiler out of here would load all of it (over a second)."""
        return False

    @property
    def torch_calls(self) -> int:
        """Operators of torch among what was recorded."""
        return sum(
            not (isinstance(part, partial) and part.func is self._library.srv_graph_replay) for part in self._parts
        )

    def replay(self) -> None:
        """All of it, in order; in torch's inference mode if it was recorded there."""
        for part in self._parts:
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
        given = kwargs or {}
        if func in _ALLOCATE:
            return self._pool.like(func(*args, **given))
        if torch.Tag.dynamic_output_shape in func.tags and not _by_whole_numbers(func, args):
            raise NotCapturable(f"the size of what {func} gives depends on numbers that change from step to step")
        try:
            result = func(*args, **given)
        except Exception as error:
            raise NotCapturable(f"{func} fails while what it reads is not computed: {error}") from error
        if func.is_view and isinstance(result, Tensor) and _at(result) == _at(args[0]):
            return result  # most operators between native calls: told apart without looking at every argument
        leaves = [leaf for leaf in tree_leaves(result) if leaf is not None]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise NotCapturable(f"{func} reads a number of a tensor, which would stay that of the first step")
        known = _storages(tree_leaves((args, given)))
        fresh = [_at(leaf) not in known for leaf in leaves]
        if any(fresh) or not leaves or func._schema.is_mutable:
            self._add(partial(_again, func, args, given, leaves, fresh))
        return result

    def _add(self, call: Callable[[], object]) -> None:
        self._end()
        self._parts.append(call)
        self._begin()

    def _begin(self) -> None:
        self._native = self._library.srv_graph_capture_begin()
        if self._native is None:
            raise RuntimeError("this thread records already: graphs do not nest")

    def _end(self) -> None:
        native, self._native = self._native, None
        calls = self._library.srv_graph_capture_end()
        self.native_calls += calls
        if calls:
            self._parts.append(partial(self._library.srv_graph_replay, native))
            weakref.finalize(self, self._library.srv_graph_free, native).atexit = False
        else:
            self._library.srv_graph_free(native)


def _again(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Tensor],
    fresh: Sequence[bool],
) -> None:
    """The operator once more; what it makes anew goes where it was the first time, what it changes is there already."""
    again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if leaf is not None]
    for was, now, new in zip(results, again, fresh, strict=True):
        if new:
            was.copy_(now)


def _by_whole_numbers(func: Any, args: Sequence[Any]) -> bool:
    """Whether it is indexing without a mask, whose result is as large as the indices are."""
    return func is torch.ops.aten.index.Tensor and all(
        each is None or each.dtype not in (torch.bool, torch.uint8) for each in args[1]
    )


def _storages(leaves: Sequence[Any]) -> set[int]:
    return {_at(each) for each in leaves if isinstance(each, Tensor)}


def _at(tensor: Tensor) -> int:
    """Where its storage lies."""
    return tensor.untyped_storage().data_ptr()

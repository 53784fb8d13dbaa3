"""The asynchronous mode: operators are enqueued in the current stream, and run when the host waits.

    call ──► host views ──► shapes of the results, by PyTorch's "meta" kernels ──► poisoned results ──► enqueued

Work of one stream runs in order, and streams know nothing of one another without events. So a program gets wrong
values every time if it overwrites host memory that an enqueued copy has still to read, reads a result on another stream
without waiting for it, or frees what another stream has still to read: freed memory is overwritten in the order of the
default stream. An operator whose result depends on data, that draws random numbers, or that has no "meta" kernel waits
for its stream and runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.stream import Stream, poison
from srv.testing.simulated_device.tensors import TensorFactory, host_view

_META = torch.device("meta")


class Deferral:
    """Enqueues operators on host views. `enabled`: the mode is on; otherwise every operator runs at once."""

    def __init__(self, enabled: bool, factory: TensorFactory, current_stream: Callable[[], Stream]) -> None:
        self.enabled = enabled
        self._factory = factory
        self._current_stream = current_stream

    def wait(self) -> None:
        """Wait for this thread's stream, before something that runs at once."""
        if self.enabled:
            self._current_stream().synchronize()

    def enqueue(self, work: Callable[[], object]) -> None:
        """Run `work` in order with the current stream; at once, unless the mode is on."""
        if not self.enabled:
            work()
            return

        def run() -> None:
            with torch.inference_mode():  # its results may be inference tensors
                work()

        self._current_stream().enqueue(run)

    def results_of(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Device tensors for the results of `function` on host views, or None if their shapes are not known.

        They are poisoned until the caller enqueues what fills them.
        """
        ran = self.run_on_meta(function, args, kwargs)
        return None if ran is None else self._allocated(ran[0])

    def run_on_meta(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[Any], dict[str, Any]] | None:
        """The result of `function` on tensors without data, and these tensors; None if it needs data."""
        shapes = [_as_meta(value) for value in args], {name: _as_meta(value) for name, value in kwargs.items()}
        try:
            return function(*shapes[0], **shapes[1]), *shapes
        except (NotImplementedError, RuntimeError, TypeError):  # of a missing or incomplete "meta" kernel
            return None

    def _allocated(self, shapes: Any) -> Any:
        if isinstance(shapes, Tensor):
            if shapes.device != _META:
                return None
            tensor = self._factory.empty_like(shapes)
            poison(host_view(tensor))
            return tensor
        if isinstance(shapes, (list, tuple)):
            allocated = [self._allocated(shape) for shape in shapes]
            return None if any(shape is None for shape in allocated) else type(shapes)(allocated)
        return None


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, torch.device):
        return _META
    if type(value) in (list, tuple):
        return [_as_meta(element) for element in value]
    return value

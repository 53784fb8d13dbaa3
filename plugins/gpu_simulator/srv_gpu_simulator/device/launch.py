"""Launches: a host function that runs as one kernel of the device, in order with its stream.

    launch(name, function, *arguments) ─> device tensors become host views ─> run | enqueued | recorded in the capture

The function writes its results into tensors that it is given. Host tensors are refused: a kernel of a GPU cannot
access them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srv.testing.simulated_device.graphs import Call
from srv.testing.simulated_device.tensors import host_view, is_device_tensor

if TYPE_CHECKING:
    from srv_gpu_simulator.device.accelerator import Accelerator


class Launcher:
    """Launches host functions on one accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __call__(self, name: str, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
        """Run `function` on `args` and `kwargs` in order with the current stream, and count it under `name`.

        Raises ValueError for a host tensor among them.
        """
        host_args = tuple(_to_host(name, value) for value in args)
        host_kwargs = {key: _to_host(name, value) for key, value in kwargs.items()}
        accelerator = self._accelerator
        accelerator.launches[name] += 1

        def run() -> None:
            with torch.inference_mode():  # a kernel writes memory, whatever kind of tensor holds it
                function(*host_args, **host_kwargs)

        if (capture := accelerator.capture) is not None:
            capture.add(Call(name, run, (), {}, ()), [*args, *kwargs.values()])
            run()
        else:
            accelerator.deferral.enqueue(run)


def _to_host(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if not is_device_tensor(value):
            raise ValueError(
                f"{name}: was given a tensor on {value.device} of shape {tuple(value.shape)}, which a kernel of the "
                "GPU cannot access; move it to the device first"
            )
        return host_view(value)
    # Lists are copied, because a graph keeps the host values of the capture.
    return [_to_host(name, one) for one in value] if isinstance(value, (list, tuple)) else value

"""Launches: a host function that runs as one operation of the device, in order with its stream.

    launch(accelerator, name, function, *arguments)
        device tensors become host views ─> run | enqueued | recorded in the capture

The function writes its results into tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srv.testing.simulated_device.graphs import Call
from srv.testing.simulated_device.tensors import host_view, is_device_tensor

if TYPE_CHECKING:
    from srv.testing.simulated_device.accelerator import SimulatedAccelerator


def launch(
    accelerator: SimulatedAccelerator, name: str, function: Callable[..., object], /, *args: Any, **kwargs: Any
) -> None:
    """Run `function` on `args` and `kwargs` in order with the current stream.

    Raises ValueError for a host tensor among them: an operation of the device cannot access it.
    """
    host_args = tuple(_to_host(name, value) for value in args)
    host_kwargs = {key: _to_host(name, value) for key, value in kwargs.items()}

    def run() -> None:
        with torch.inference_mode():  # an operation writes memory, whatever kind of tensor holds it
            function(*host_args, **host_kwargs)

    if (capture := accelerator.recorder.active) is not None:
        capture.add(Call(name, run, (), {}, ()), [*args, *kwargs.values()])
        run()
    else:
        accelerator.deferral.enqueue(run)


def _to_host(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        if not is_device_tensor(value):
            raise ValueError(
                f"{name}: was given a tensor on {value.device} of shape {tuple(value.shape)}, which the device cannot "
                "access; move it there first"
            )
        return host_view(value)
    # Lists are copied, because a graph keeps the host values of the capture.
    return [_to_host(name, one) for one in value] if isinstance(value, (list, tuple)) else value

"""Launches of kernels, counted by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from srv.testing.simulated_device.launch import launch

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
        launch(self._accelerator, name, function, *args, **kwargs)
        self._accelerator.launches[name] += 1

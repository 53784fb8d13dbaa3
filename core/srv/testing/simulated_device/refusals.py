"""The device's error messages, which a simulated vendor backend can replace by the vendor's.

The rules themselves are in `placement`, `memory` and `graphs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from srv.testing.simulated_device.placement import operator_name, tensor_locations


@dataclass(slots=True)
class Refusals:
    """The messages of one device. `device` is its name with its index, such as "toy:0"; the accelerator sets it.

    mixed: has the fields {operator} and {places}. exhausted: {device}, {nbytes}, {free} and {capacity}. capturing: a
    clause about the running capture, with {device}.
    """

    device: str
    mixed: str = (
        "Expected all tensors to be on the same device, but {operator} was given {places}. "
        "Move them to one device first; only host numbers (0-dim tensors that are no index) and copies may mix."
    )
    exhausted: str = (
        "{device} is out of memory: tried to allocate {nbytes} bytes, but {free} of {capacity} are free. "
        "Use less of it: a smaller batch, or a smaller KV pool."
    )
    capturing: str = "while {device} captures a graph"

    def mixed_devices(
        self, schema: torch.FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> RuntimeError:
        """Operands on several devices: names the operator, and the device of each tensor argument."""
        where = ", ".join(tensor_locations(schema, args, kwargs))
        return RuntimeError(self.mixed.format(operator=operator_name(schema), places=where))

    def out_of_memory(self, nbytes: int, free: int, capacity: int) -> torch.OutOfMemoryError:
        """The device has too little free memory. All arguments are in bytes."""
        text = self.exhausted.format(device=self.device, nbytes=nbytes, free=free, capacity=capacity)
        return torch.OutOfMemoryError(text)

    def not_permitted(self, what: str, instead: str) -> RuntimeError:
        """`what` cannot be part of a graph; `instead` says why, or what to do."""
        return RuntimeError(f"{what}: not permitted {self.capturing.format(device=self.device)}; {instead}")

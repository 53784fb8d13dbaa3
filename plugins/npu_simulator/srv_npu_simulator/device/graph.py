"""NPU graphs: operators captured once and replayed on the same memory.

    capture   operators run once, so that shapes are known; their results are then poisoned, because a real capture
              computes nothing. Operations that are not permitted in a capture (waiting for the device, copies from or
              to the host, results whose size depends on data) raise RuntimeError.
    replay    the same operators on the same storages, in the same order, with the captured host values: sequence
              lengths do not change unless `update` changes them.
    update    sets host values for the next replay. While an earlier replay may still run, the card would apply the new
              values to it, or lose them: here the host must have waited for that replay.

Memory allocated during a capture belongs to the graph for its lifetime. Unlike in
`srv.testing.simulated_device.graphs`, values are updated per operator, and a freed input is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srv.testing.simulated_device.graphs import DATA_DEPENDENT, Call, may_depend_on_data
from srv.testing.simulated_device.memory import Block
from srv.testing.simulated_device.placement import operator_name
from srv.testing.simulated_device.stream import StreamPosition
from srv.testing.simulated_device.tensors import block_of, is_device_tensor
from srv.testing.simulated_device.vendor import Capture, VendorGraph

if TYPE_CHECKING:
    from srv_npu_simulator.device.accelerator import Accelerator


@dataclass(slots=True)
class Task(Call):
    """A recorded operator of torch_npu. `updatable`: names of host values that `update` can change."""

    updatable: frozenset[str] = frozenset()


class Recording(Capture):
    """What one graph has captured. Its results are kept, and their memory is its own."""

    def __init__(self, can_update: bool, enqueue: Callable[[Callable[[], object]], None]) -> None:
        super().__init__("NPUGraph", enqueue)
        self.can_update = can_update
        self._results: list[Tensor] = []
        self._own_blocks: set[int] = set()

    @property
    def tasks(self) -> list[Task]:
        """The operators with updatable host values."""
        return [call for call in self._calls if isinstance(call, Task) and call.updatable]

    def owns(self, block: Block) -> bool:
        return id(block) in self._own_blocks

    def capture_error(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Random numbers are permitted, and each replay draws new ones; every index is refused."""
        return (operator_name(operator._schema), DATA_DEPENDENT) if may_depend_on_data(operator) else None

    def created(self, tensor: Tensor) -> None:
        super().created(tensor)
        self._results.append(tensor)
        self._own_blocks.add(id(block_of(tensor)))


class NPUGraph(VendorGraph):
    """`torch.npu.NPUGraph`. Capture through `torch.npu.graph(...)`."""

    kind = "NPUGraph"

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._replayed: StreamPosition | None = None  # behind the last replay

    def capture_begin(
        self, pool: object = None, capture_error_mode: str = "global", auto_dispatch_capture: bool = False
    ) -> None:
        self.check_free()
        accelerator = self._accelerator
        self.begin(Recording(auto_dispatch_capture, accelerator.deferral.enqueue), accelerator.memory)

    def replay(self) -> None:
        super().replay()
        self._replayed = StreamPosition(self._accelerator.current_stream())

    def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """Change host values of captured operators for the following replays.

        A single mapping (argument name: value) applies to all operators with such values; otherwise there is one
        mapping per such operator, in the order of the capture.
        """
        recording = self.captured("update", Recording)
        if not recording.can_update:
            raise RuntimeError(
                "NPUGraph.update: this graph was captured without auto_dispatch_capture=True, so its operators' host "
                "values cannot be changed"
            )
        if self._replayed is not None and not self._replayed.reached:
            raise RuntimeError(
                "NPUGraph.update: the last replay of this graph may still be running, and would take the new values or "
                "lose them; wait for it first (an event behind it, or synchronize)"
            )
        if isinstance(cpu_update_input, Mapping):
            raise RuntimeError("NPUGraph.update: cpu_update_input: is a mapping, must be a list of mappings")
        tasks = recording.tasks
        updates = list(cpu_update_input)
        if len(updates) not in (1, len(tasks)):
            raise RuntimeError(
                f"NPUGraph.update: cpu_update_input: has {len(updates)} entries, must have one, or one for each of the "
                f"{len(tasks)} captured operators with host values"
            )
        for task, values in zip(tasks, updates if len(updates) == len(tasks) else updates * len(tasks), strict=True):
            for name, value in values.items():
                if name not in task.updatable:
                    names = ", ".join(sorted(task.updatable))
                    raise RuntimeError(
                        f"NPUGraph.update: cpu_update_input: {name!r} is no host value of {task.name}; it has {names}"
                    )
                task.kwargs[name] = host_integers("NPUGraph.update", name, value)

    def pool(self) -> tuple[int, int]:
        return (0, id(self))


def host_integers(operator: str, name: str, value: Any) -> list[int] | None:
    """A copy of a host value (list, tuple, numpy array, host integer tensor) as a list.

    Raises RuntimeError for a device tensor, because the operator reads these numbers on the host.
    """
    if value is None:
        return None
    if is_device_tensor(value):
        raise RuntimeError(
            f"{operator}: {name}: is a tensor on {value.device}, must be integers on the host: a list, or a host tensor"
        )
    integers = value.tolist() if hasattr(value, "tolist") else list(value)
    if not isinstance(integers, list) or not all(type(one) is int for one in integers):
        raise RuntimeError(f"{operator}: {name}: is {value!r}, must be one list of integers")
    return integers

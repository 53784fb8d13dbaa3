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

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from srv.testing.simulated_device.graphs import DATA_DEPENDENT, Call, Graph, Recorder, may_depend_on_data
from srv.testing.simulated_device.memory import Block, DeviceMemory
from srv.testing.simulated_device.placement import operator_name
from srv.testing.simulated_device.stream import Stream, StreamPosition, poison
from srv.testing.simulated_device.tensors import block_of, host_view, is_device_tensor


@dataclass(slots=True)
class Task(Call):
    """A recorded operator of torch_npu. `updatable`: names of host values that `update` can change."""

    updatable: frozenset[str] = frozenset()


class Recording(Graph):
    """The capture of one graph."""

    def __init__(self, can_update: bool, enqueue: Callable[[Callable[[], object]], None]) -> None:
        super().__init__(enqueue)
        self._in_order = enqueue
        self.can_update = can_update
        self._created: list[Tensor] = []
        self._own_blocks: set[int] = set()
        self._inputs: dict[int, tuple[str, weakref.ref[Block]]] = {}

    @property
    def tasks(self) -> list[Task]:
        """The operators with updatable host values."""
        return [call for call in self._calls if isinstance(call, Task) and call.updatable]

    def capture_error(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Random numbers are permitted, and each replay draws new ones; every index is refused."""
        return (operator_name(operator._schema), DATA_DEPENDENT) if may_depend_on_data(operator) else None

    def created(self, tensor: Tensor) -> None:
        self._created.append(tensor)
        self._own_blocks.add(id(block_of(tensor)))

    def add(self, call: Call, inputs: Sequence[Any]) -> None:
        for tensor in _tensors(inputs):
            block = block_of(tensor)
            if id(block) not in self._own_blocks:
                self._inputs.setdefault(id(block), (call.name, weakref.ref(block)))
        super().add(call, inputs)

    def finish(self) -> None:
        """Poison the results after the capture: a program must not read them before a replay."""
        for tensor in self._created:
            poison(host_view(tensor))

    def replay(self) -> None:
        for name, reference in self._inputs.values():
            if reference() is None:
                raise RuntimeError(
                    f"NPUGraph.replay: memory that the captured {name} uses has been freed since the capture; "
                    "keep every input and output of a graph alive for as long as the graph"
                )
        self._in_order(self.run)


class NPUGraph:
    """`torch.npu.NPUGraph`. Capture through `torch.npu.graph(...)`."""

    def __init__(
        self,
        recorder: Recorder,
        memory: DeviceMemory,
        current_stream: Callable[[], Stream],
        enqueue: Callable[[Callable[[], object]], None],
    ) -> None:
        self._enqueue = enqueue
        self._recorder = recorder
        self._memory = memory
        self._current_stream = current_stream
        self._recording: Recording | None = None
        self._replayed: StreamPosition | None = None  # behind the last replay

    def capture_begin(
        self, pool: object = None, capture_error_mode: str = "global", auto_dispatch_capture: bool = False
    ) -> None:
        if self._recording is not None:
            raise RuntimeError("NPUGraph.capture_begin: this graph holds a capture; call reset() first")
        if self._recorder.busy:
            raise RuntimeError("NPUGraph.capture_begin: another capture is under way, and captures do not nest")
        recording = Recording(auto_dispatch_capture, self._enqueue)
        self._recorder.begin(recording, self._memory)
        self._recording = recording

    def capture_end(self) -> None:
        if self._recording is None:
            raise RuntimeError("NPUGraph.capture_end: nothing is being captured into this graph")
        self._recorder.end()
        self._recording.finish()

    def abandon(self) -> None:
        """End and discard a failed capture."""
        self._recorder.end()
        self._recording = None

    def replay(self) -> None:
        """Run the captured operators on the captured memory."""
        self._recorder.refuse("NPUGraph.replay", "replay after the capture has ended")
        self._captured("replay").replay()
        self._replayed = StreamPosition(self._current_stream())

    def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """Change host values of captured operators for the following replays.

        A single mapping (argument name: value) applies to all operators with such values; otherwise there is one
        mapping per such operator, in the order of the capture.
        """
        recording = self._captured("update")
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
                    known = ", ".join(sorted(task.updatable))
                    raise RuntimeError(
                        f"NPUGraph.update: cpu_update_input: {name!r} is no host value of {task.name}; it has {known}"
                    )
                task.kwargs[name] = host_integers("NPUGraph.update", name, value)

    def reset(self) -> None:
        """Release the capture and its memory."""
        self._recording = None

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def _captured(self, what: str) -> Recording:
        if self._recording is None:
            raise RuntimeError(f"NPUGraph.{what}: nothing was captured into this graph; use torch.npu.graph(g) first")
        return self._recording


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
    listed = value.tolist() if hasattr(value, "tolist") else list(value)
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise RuntimeError(f"{operator}: {name}: is {value!r}, must be one list of integers")
    return listed


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if is_device_tensor(value):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found

"""NPU graphs: what ran between begin and end of a capture, to be run again on the same memory.

    capture   operators run once, so that shapes are known; their results are then poisoned, since a real capture
              computes nothing. What a capturing stream may not do (wait for the device, copy from or to the host,
              give a result whose size depends on data) raises RuntimeError.
    replay    the same operators on the same storages, in the same order, with the host values that they were
              captured with: sequence lengths stay what they were unless `update` changes them.
    update    for the replay that follows. While an earlier one may still run, the card would give it the new values,
              or lose them: here the host must have waited for that replay.

Memory made during a capture belongs to the graph for as long as it lives. Unlike `srv.testing.simulated_device.graphs`,
whose calls these are: values are changed operator by operator, and an input that was freed is an error.
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
from srv.testing.simulated_device.stream import Mark, Stream, poison
from srv.testing.simulated_device.tensors import block_of, host_view, is_device_tensor


@dataclass(slots=True)
class Task(Call):
    """A recorded operator of torch_npu. `updatable`: names of host values that may be changed between replays."""

    updatable: frozenset[str] = frozenset()


class Recording(Graph):
    """What one graph holds."""

    def __init__(self, can_update: bool) -> None:
        super().__init__()
        self.can_update = can_update
        self._made: list[Tensor] = []
        self._own: set[int] = set()
        self._inputs: dict[int, tuple[str, weakref.ref[Block]]] = {}

    @property
    def tasks(self) -> list[Task]:
        """The operators with host values."""
        return [call for call in self._calls if isinstance(call, Task) and call.updatable]

    def objection(
        self, operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, str] | None:
        """Numbers may be drawn, and each replay draws new ones; an index is refused whatever it holds."""
        return (operator_name(operator._schema), DATA_DEPENDENT) if may_depend_on_data(operator) else None

    def created(self, tensor: Tensor) -> None:
        self._made.append(tensor)
        self._own.add(id(block_of(tensor)))

    def add(self, call: Call, inputs: Sequence[Any]) -> None:
        for tensor in _tensors(inputs):
            block = block_of(tensor)
            if id(block) not in self._own:
                self._inputs.setdefault(id(block), (call.name, weakref.ref(block)))
        super().add(call, inputs)

    def finish(self) -> None:
        """After the capture its results hold nothing that a program may read."""
        for tensor in self._made:
            poison(host_view(tensor))

    def replay(self) -> None:
        for name, reference in self._inputs.values():
            if reference() is None:
                raise RuntimeError(
                    f"NPUGraph.replay: memory that the captured {name} uses has been freed since the capture; "
                    "keep every input and output of a graph alive for as long as the graph"
                )
        self.run()


class NPUGraph:
    """`torch.npu.NPUGraph`. Capture through `torch.npu.graph(...)`."""

    def __init__(self, recorder: Recorder, memory: DeviceMemory, current_stream: Callable[[], Stream]) -> None:
        self._recorder = recorder
        self._memory = memory
        self._current_stream = current_stream
        self._recording: Recording | None = None
        self._replayed: Mark | None = None  # behind the last replay

    def capture_begin(
        self, pool: object = None, capture_error_mode: str = "global", auto_dispatch_capture: bool = False
    ) -> None:
        if self._recording is not None:
            raise RuntimeError("NPUGraph.capture_begin: this graph holds a capture; call reset() first")
        if self._recorder.busy:
            raise RuntimeError("NPUGraph.capture_begin: another capture is under way, and captures do not nest")
        recording = Recording(auto_dispatch_capture)
        self._recorder.begin(recording, self._memory)
        self._recording = recording

    def capture_end(self) -> None:
        if self._recording is None:
            raise RuntimeError("NPUGraph.capture_end: nothing is being captured into this graph")
        self._recorder.end()
        self._recording.finish()

    def abandon(self) -> None:
        """End a capture that failed, and forget it."""
        self._recorder.end()
        self._recording = None

    def replay(self) -> None:
        """Run what was captured, on the memory it was captured with."""
        self._recorder.refuse("NPUGraph.replay", "replay after the capture has ended")
        self._held("replay").replay()
        self._replayed = Mark(self._current_stream())

    def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """Change host values of captured operators, for the replays that follow.

        One mapping (argument name: value) is applied to every operator that has such values; otherwise there is
        one for each of them, in the order of the capture. Argument names are the operator's own.
        """
        recording = self._held("update")
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
        """Let go of the capture and its memory."""
        self._recording = None

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def _held(self, what: str) -> Recording:
        if self._recording is None:
            raise RuntimeError(f"NPUGraph.{what}: nothing was captured into this graph; use torch.npu.graph(g) first")
        return self._recording


def host_integers(operator: str, name: str, value: Any) -> list[int] | None:
    """A host value of an operator (list, tuple, numpy array, host integer tensor) as a list of its own.

    RuntimeError for a device tensor: the operator reads these numbers on the host.
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

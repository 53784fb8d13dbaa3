"""NPU graphs: what ran between begin and end of a capture, to be run again on the same memory.

    capture   operators run once, so that shapes are known; their results are then poisoned, since a real capture
              computes nothing. What a capturing stream may not do (wait for the device, copy from or to the host,
              give a result whose size depends on data) raises RuntimeError.
    replay    the same operators on the same storages, in the same order, with the host values that they were
              captured with: sequence lengths stay what they were unless `update` changes them.

Memory made during a capture belongs to the graph for as long as it lives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from srv_npu_simulator.device.memory import Allocation
from srv_npu_simulator.device.stream import poison
from srv_npu_simulator.device.tensors import allocation_of, host_view, is_device_tensor


@dataclass(slots=True)
class Task:
    """One recorded operator, over host views. `targets`: where each result goes; None: an argument was written."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor | None, ...]
    updatable: frozenset[str] = frozenset()

    def run(self) -> None:
        result = self.function(*self.args, **self.kwargs)
        for target, value in zip(self.targets, _flat(result) if self.targets else (), strict=True):
            if target is None:
                continue
            if target.shape != value.shape:
                raise RuntimeError(
                    f"NPUGraph.replay: {self.name} gives {tuple(value.shape)} now and gave {tuple(target.shape)} when "
                    "it was captured; only values may change between capture and replay"
                )
            target.copy_(value)


class Recording:
    """What one graph holds."""

    def __init__(self, thread: int, can_update: bool) -> None:
        self.thread = thread
        self.can_update = can_update
        self.tasks: list[Task] = []
        self._made: list[Tensor] = []
        self._own: set[int] = set()
        self._inputs: dict[int, tuple[str, weakref.ref[Allocation]]] = {}

    def created(self, tensor: Tensor) -> None:
        """Device memory that was made during the capture."""
        self._made.append(tensor)
        self._own.add(id(allocation_of(tensor)))

    def add(self, task: Task, inputs: Sequence[Any], made: Sequence[Any]) -> None:
        """Record `task`, which read and wrote the device tensors in `inputs` and made those in `made`."""
        for tensor in _tensors(inputs):
            allocation = allocation_of(tensor)
            if id(allocation) not in self._own:
                self._inputs.setdefault(id(allocation), (task.name, weakref.ref(allocation)))
        for tensor in _tensors(made):
            self.created(tensor)
        self.tasks.append(task)

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
        # What was captured may be inference tensors, which may only be written in inference mode.
        with torch.inference_mode():
            for task in self.tasks:
                task.run()


class Recorder:
    """Whether something is being captured now. One object for the whole device."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @property
    def active(self) -> Recording | None:
        """The recording that this thread's operators belong to."""
        recording = self._recording
        return recording if recording is not None and recording.thread == threading.get_ident() else None

    def begin(self, can_update: bool) -> Recording:
        if self._recording is not None:
            raise RuntimeError("NPUGraph.capture_begin: another capture is under way, and captures do not nest")
        self._recording = Recording(threading.get_ident(), can_update)
        return self._recording

    def end(self) -> None:
        self._recording = None

    def forbid(self, what: str, instead: str) -> None:
        """RuntimeError if a capture is under way: `what` cannot be captured, `instead` says what to do."""
        if self.active is not None:
            raise RuntimeError(f"{what}: not permitted while a stream is being captured into an NPUGraph; {instead}")


class NPUGraph:
    """`torch.npu.NPUGraph`. Capture through `torch.npu.graph(...)`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recording: Recording | None = None

    def capture_begin(
        self, pool: object = None, capture_error_mode: str = "global", auto_dispatch_capture: bool = False
    ) -> None:
        if self._recording is not None:
            raise RuntimeError("NPUGraph.capture_begin: this graph holds a capture; call reset() first")
        self._recording = self._recorder.begin(auto_dispatch_capture)

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
        self._recorder.forbid("NPUGraph.replay", "replay after the capture has ended")
        self._held("replay").replay()

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
        if isinstance(cpu_update_input, Mapping):
            raise RuntimeError("NPUGraph.update: cpu_update_input: is a mapping, must be a list of mappings")
        tasks = [task for task in recording.tasks if task.updatable]
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


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [one for value in result for one in _flat(value)]
    return [result]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if is_device_tensor(value):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found

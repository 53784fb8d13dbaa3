"""Rank processes, and what each of them does with the communicator of the CPU platform; returns plain values."""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self, TypeVar

import pytest
import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.errors import RankLost
from srv_cpu.communicator import CpuCommunicator
from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool
from srv_kernels.cpu.library import load

ABSENT = 1  # the rank that does not join
LATE_S = 1.5  # how late it comes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
START_TIMEOUT_S = 60.0
CHUNK = 512 * 1024  # bytes: CHUNK in native/shared_reduce.cpp
MAPPED = "/memfd:srv-"  # in the list of a process's mappings

Result = TypeVar("Result")


class RankProcesses:
    """Processes that run functions of groups, each as one rank. One that is killed is replaced for the next run."""

    def __init__(self, size: int) -> None:
        self._members = [_start() for _ in range(size)]

    def run(
        self, function: Callable[..., Result], folder: Path, timeout_s: float, *arguments: object
    ) -> list[Result | None]:
        """function(group, *arguments) of all ranks; None of one that is killed."""
        self._members = [member if member[0].is_alive() else _start() for member in self._members]
        size = len(self._members)
        for rank, (_, pipe) in enumerate(self._members):
            pipe.send((function, RankGroup("tensor", rank, size, str(folder), timeout_s, START_TIMEOUT_S), arguments))
        return [_received(pipe) for _, pipe in self._members]

    def __len__(self) -> int:
        return len(self._members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in self._members:
            process.kill()
            process.join()


def _start() -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_serve, args=(other,), daemon=True)
    process.start()
    other.close()
    return process, pipe


def _received(pipe: Connection) -> Result | None:
    try:
        received: Result = pipe.recv()
    except EOFError:
        return None
    if isinstance(received, Exception):
        raise received
    return received


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        function, group, arguments = pipe.recv()
        try:
            result = function(group, *arguments)
        except Exception as error:  # noqa: BLE001 (the test raises it)
            result = error
        pipe.send(result)


@dataclass(frozen=True)
class Used:
    """What one rank saw. `mapped`: whether its communicator shares memory, before and after it is aborted."""

    sums: Sequence[str]  # digests, one per dtype and size
    faults: Sequence[str]
    replays: Sequence[Sequence[float]]
    mapped: tuple[bool, bool]


def sizes(dtype: torch.dtype) -> Sequence[int]:
    """Numbers of elements: none, few, and those with which the last chunk is full, almost empty, and odd."""
    chunk = CHUNK // dtype.itemsize
    return 0, 1, 37, 4096, chunk - 1, chunk, chunk + 1, 3 * chunk + 5


def numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=generator) * 10.0**rank).to(dtype)


def use(group: RankGroup, unmappable: int | None) -> Used:
    """All operations. unmappable: a rank that cannot map the memory, so that all use gloo."""
    with pytest.MonkeyPatch.context() as patched:
        if group.rank == unmappable:
            patched.setattr(mmap, "mmap", _refuse)
        communicator = CpuCommunicator(group)
    with _aborted_at_end(communicator):
        mapped = _has_mapping()
        sums, faults = [], [*_gather_faults(group, communicator), *_move_faults(group, communicator)]
        for dtype in DTYPES:
            for size in sizes(dtype):
                total, fault = _sum(group, communicator, size, dtype)
                sums.append(hashlib.sha256(total.view(torch.uint8).numpy().tobytes()).hexdigest())
                faults += fault
                faults += _scatter_faults(group, communicator, size, dtype)
        replays = _replays(group, communicator) if load().library else []
    return Used(sums, faults, replays, (mapped, _has_mapping()))


@contextmanager
def _aborted_at_end(communicator: CpuCommunicator) -> Iterator[None]:
    try:
        communicator.barrier()
        yield
        communicator.barrier()  # gloo may end the operations of ranks that are not as far
    finally:
        communicator.abort()


def _refuse(*_: object) -> None:
    raise OSError("no memory is mapped here")


def _has_mapping() -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and MAPPED in maps.read_text()


def _sum(
    group: RankGroup, communicator: CpuCommunicator, size: int, dtype: torch.dtype
) -> tuple[Tensor, Sequence[str]]:
    """A sum, and its error if it is larger than rounding explains."""
    inputs = torch.stack([numbers(rank, size, dtype) for rank in range(group.size)])
    total = inputs[group.rank].clone()
    if communicator.all_reduce(total) is not total:
        return total, [f"{size} of {dtype}: another tensor is returned"]
    if not size:
        return total, []
    rounding = 4 * torch.finfo(dtype).eps * float(inputs.double().abs().max())
    error = float((total.double() - inputs.double().sum(0)).abs().max())
    return total, [] if error <= rounding else [f"{size} of {dtype}: error {error}, more than {rounding}"]


def _gather_faults(group: RankGroup, communicator: CpuCommunicator) -> list[str]:
    """Gathers in the order of ranks, of any dtype and strides, and sums of integers."""
    faults = []
    whole = torch.arange(CHUNK + 6).reshape(2, -1)  # int64: several chunks
    for tensor in (torch.zeros(0), torch.tensor(2.5), torch.ones(3, dtype=torch.bool), whole, whole.t(), whole[:, ::3]):
        gathered = communicator.all_gather(tensor + group.rank if tensor.dtype != torch.bool else tensor)
        wanted = torch.stack([tensor + rank if tensor.dtype != torch.bool else tensor for rank in range(group.size)])
        if not torch.equal(gathered, wanted):
            faults.append(f"gathering {tensor.dtype} {tuple(tensor.shape)} gives other values")
    if communicator.all_reduce(torch.tensor([2**40 + group.rank])).item() != 3 * 2**40 + 3:
        faults.append("the sum of integers is not exact")
    try:
        communicator.all_reduce(torch.ones(4, 2).t())
        faults.append("a sum with other strides is not refused")
    except ValueError:
        pass
    return faults


def _scatter_faults(group: RankGroup, communicator: CpuCommunicator, size: int, dtype: torch.dtype) -> list[str]:
    """This rank's part of a sum, whose parts begin and end within chunks."""
    inputs = torch.stack([numbers(rank, size * group.size, dtype) for rank in range(group.size)])
    part = communicator.reduce_scatter(inputs[group.rank].clone())
    if not size:
        return []
    exact = inputs.double().sum(0)[group.rank * size : (group.rank + 1) * size]
    rounding = 4 * torch.finfo(dtype).eps * float(inputs.double().abs().max())
    error = float((part.double() - exact).abs().max())
    return [] if error <= rounding else [f"part of {size} of {dtype}: error {error}, more than {rounding}"]


def _move_faults(group: RankGroup, communicator: CpuCommunicator) -> list[str]:
    """Rows and tensors of several chunks that go to others, with borders within chunks; one rank has none."""
    size, me, faults = group.size, group.rank, []
    whole = [torch.arange(3 * CHUNK + 5).add(rank).to(torch.uint8) for rank in range(size)]
    copies = [communicator.broadcast(whole[me].clone(), source) for source in range(size)]
    if not all(torch.equal(*pair) for pair in zip(copies, whole, strict=True)):
        faults.append("broadcasts give other values")
    blocks = [each[: size * (CHUNK // 2 + 1)].view(size, -1) for each in whole]
    if not torch.equal(communicator.all_to_all(blocks[me]), torch.stack([each[me] for each in blocks])):
        faults.append("an exchange of equal parts gives other values")
    table = [[0, 0, 0], [CHUNK + 3, 1, CHUNK - 7], [2, 0, 2 * CHUNK]]
    sent = [each[: sum(row)].split(row) for each, row in zip(whole, table, strict=True)]
    received = communicator.all_to_all_uneven(whole[me][: sum(table[me])], table[me], [row[me] for row in table])
    if not torch.equal(received, torch.cat([parts[me] for parts in sent])):
        faults.append("an exchange of unequal parts gives other values")
    try:
        communicator.all_to_all_uneven(torch.ones(size), [1] * size, [1 + me] * size)
        faults.append("rows that one rank expects and the others do not send are not refused")
    except ValueError:
        pass
    return faults


def _replays(group: RankGroup, communicator: CpuCommunicator) -> list[list[float]]:
    """A captured step, run twice with other inputs."""
    source, out = torch.zeros(1, 4), torch.zeros(group.size, 1, 4)
    graph, outs = CapturedGraph(GraphMemoryPool()), []
    with torch.inference_mode(), graph:
        out.copy_(communicator.all_gather(communicator.all_reduce(source * 2) + source))
    for _ in range(2):
        source.add_(group.rank + 1)
        with torch.inference_mode():
            graph.replay()
        outs.append(out[:, 0, 0].tolist())
    return outs


def _lose(communicator: CpuCommunicator) -> tuple[str, float]:
    """The error of an operation that fails, and after how many seconds."""
    started = time.monotonic()
    try:
        communicator.all_reduce(torch.ones(3))
    except RankLost as lost:
        return str(lost), time.monotonic() - started
    return "", time.monotonic() - started


def wait_for_absent(group: RankGroup, how: str) -> tuple[str, float]:
    """Lose a member that comes "late", is "killed", or is "aborted": then rank 0 aborts the group while it waits."""
    communicator = CpuCommunicator(group)
    communicator.all_reduce(torch.ones(3))  # not `barrier`: gloo may still be sending when it returns
    if group.rank == ABSENT:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LATE_S)
    elif group.rank == 0 and how == "aborted":
        threading.Timer(0.3, communicator.abort).start()
        return _lose(communicator)
    loss = _lose(communicator)
    communicator.abort()
    return loss

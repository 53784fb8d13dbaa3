"""One rank of the checks of communicators: it performs the tasks that `srv.testing.conformance.ranks` requests.

Started as `python -m srv.testing.conformance.rank_process FD`, like `srv.testing.conformance.child`. A request is an
object with "task" and "group", an answer an object with "fault" (empty if there is none) and the results of the task.
Every rank calls the same operations in the same order; rank 1 is the one that is late or stays away.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.errors import RankLost
from srv.platform.contract import join
from srv.platform.interface import AttentionBatch, Communicator
from srv.testing.conformance.bench import Bench, difference
from srv.testing.conformance.child import describe_exception, serve
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import AttentionSetup, declared_dtypes, dtype_of, select_setups

SHAPES = ((1,), (3, 37), (16, 1024), (257, 129))
SLACK_S = 5.0
_LATE_RANK = 1  # the rank that is late, or stays away
_LATE_S = 0.3  # how much later it enters the barrier


def main() -> int:
    tasks = _Tasks()
    return serve(tasks.respond)


class _Tasks:
    """The tasks of one rank, in their order. The communicator is kept from one task to the next."""

    _communicator: Communicator

    def respond(self, request: str, kit: Kit) -> dict[str, Any]:
        """The results of one task, or the fault that it found."""
        given = json.loads(request)
        tasks: Mapping[str, Callable[[Kit, RankGroup], dict[str, Any]]] = {
            "operations": self.operations,
            "capture": self.capture,
            "lose": self.lose,
            "leave": self.leave,
        }
        try:
            return {"fault": "", **tasks[given["task"]](kit, RankGroup(**given["group"]))}
        except Fault as fault:
            return {"fault": fault.message}
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            return {"fault": f"it raised {describe_exception(error)}", "lost": isinstance(error, RankLost)}

    def operations(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Join the group, and call every operation."""
        self._communicator = communicator = join(kit.platform, group)
        if group.rank == _LATE_RANK:
            time.sleep(_LATE_S)
        entered = time.monotonic()
        communicator.barrier()
        left = time.monotonic()
        cases = [(shape, dtype) for dtype in declared_dtypes(kit) for shape in SHAPES]
        sums = []
        for shape, dtype in cases:
            inputs = [_numbers(rank, shape, dtype_of(dtype)) for rank in range(group.size)]
            what = f"{dtype} {list(shape)}"
            _check_gather(kit, communicator, inputs, what)
            sums.append(_check_reduce(kit, communicator, inputs, what))
        described = [f"{dtype} {list(shape)}" for shape, dtype in cases]
        return {"entered": entered, "left": left, "sums": sums, "cases": described}

    def capture(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Join the group, and replay a captured step."""
        setups = select_setups(kit, max_page_sizes=1, captured=True)
        self._communicator = join(kit.platform, group)
        for setup in setups:
            _check_captured(kit, setup, self._communicator, group)
        return {"summary": "; ".join(str(setup) for setup in setups)}

    def lose(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Join another group of the same name, which needs what `abort` releases; rank 1 stays away afterwards."""
        self._communicator = join(kit.platform, group)
        self._communicator.barrier()
        dtype = dtype_of(declared_dtypes(kit)[0])
        inputs = [_numbers(rank, SHAPES[1], dtype) for rank in range(group.size)]
        _check_reduce(kit, self._communicator, inputs, "a group that was joined after another one was aborted")
        if group.rank == _LATE_RANK:
            return {}
        seconds = _lose(kit, self._communicator, group, "an operation that a rank does not join")
        if seconds < group.timeout_s / 2:
            raise Fault(f"an operation waited for the other rank for {seconds:.1f} s, not for {group.timeout_s:g} s")
        return {"summary": f"a rank that stayed away was reported after {seconds:.1f} s"}

    def leave(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Abort, whether or not an operation has failed."""
        self._communicator.abort()
        return {}


def _numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The input of a rank, on the host. Numbers of different magnitudes, so that rounding depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * 10.0**rank).to(dtype)


def _check_gather(kit: Kit, communicator: Communicator, inputs: list[Tensor], what: str) -> None:
    own = inputs[kit.rank].to(kit.device, copy=True)
    gathered = communicator.all_gather(own)
    _check_tensor(gathered, kit, inputs[0].dtype, (len(inputs), *inputs[0].shape), f"all_gather of {what}")
    if not torch.equal(gathered.to("cpu"), torch.stack(inputs)):
        raise Fault(f"all_gather of {what} does not return the tensors of all members in the order of their ranks")
    if not torch.equal(own.to("cpu"), inputs[kit.rank]):
        raise Fault(f"all_gather of {what} changes its argument")


def _check_reduce(kit: Kit, communicator: Communicator, inputs: list[Tensor], what: str) -> str:
    """A digest of the sum, which the ranks compare."""
    own = inputs[kit.rank].to(kit.device, copy=True)
    returned = communicator.all_reduce(own)
    if returned is not own:
        raise Fault(f"all_reduce of {what} returns another tensor than its argument, which it must replace by the sum")
    exact = torch.stack(inputs).double()
    bound = torch.finfo(own.dtype).eps * exact.abs().sum(0)
    total = own.to("cpu")
    error = (total.double() - exact.sum(0)).abs()
    if not bool((error <= bound).all()):
        raise Fault(
            f"all_reduce of {what} is off by {float(error.max()):.3g}; rounding explains {float(bound.max()):.3g}"
        )
    return hashlib.sha256(total.view(torch.uint8).numpy().tobytes()).hexdigest()


def _check_tensor(found: object, kit: Kit, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(found, Tensor):
        raise Fault(f"{what} returned a {type(found).__name__}, not a tensor")
    if (found.dtype, tuple(found.shape)) != (dtype, shape) or not same_device(found.device, kit.device):
        raise Fault(
            f"{what} returned {found.dtype} {tuple(found.shape)} on {found.device}, not {dtype} {shape} on {kit.device}"
        )


def _check_captured(kit: Kit, setup: AttentionSetup, communicator: Communicator, group: RankGroup) -> None:
    """A captured step with attention and both operations, replayed with other inputs.

    Its one row has one token, so that attention returns the token's value.
    """
    graphs = kit.platform.graphs
    assert graphs is not None  # see graph.declared
    bench = Bench(kit, setup)
    shape, table = setup.shape, torch.ones(1, 1, dtype=torch.int32, device=kit.device)
    source = torch.zeros(1, shape.heads, shape.head_dim, dtype=dtype_of(setup.dtype), device=kit.device)
    out = source.new_zeros(group.size, *source.shape)

    def plan() -> Any:
        return bench.backend.plan(AttentionBatch([1], [1], table, graph=1))

    def run() -> Tensor:
        hidden = source
        for layer in (*bench.layers, *bench.layers):
            hidden = bench.backend.forward(layer, hidden, hidden, hidden, metadata)
        gathered = communicator.all_gather(hidden)
        return out.copy_(gathered.add_(communicator.all_reduce(hidden)))

    with torch.inference_mode():
        metadata = plan()
        communicator.barrier()
        output = graphs.capture(1, run)
        for factor in (1.0, 3.0):
            source.fill_(factor * (group.rank + 1))
            graphs.replay(1, [plan()])
            inputs = torch.arange(1, group.size + 1).double() * factor
            want = (inputs + inputs.sum()).view(-1, 1, 1, 1).expand(out.shape)
            error = difference(output.to("cpu"), want, setup.dtype)
            if error:
                raise Fault(f"{setup}: a replayed step with all_reduce and all_gather gives {error}")


def _lose(kit: Kit, communicator: Communicator, group: RankGroup, what: str) -> float:
    """The seconds after which an operation that the other rank does not join raises RankLost."""
    started = time.monotonic()
    try:
        communicator.all_reduce(torch.ones(3, device=kit.device)).to("cpu")
    except RankLost as error:
        seconds = time.monotonic() - started
        if group.name not in str(error):
            raise Fault(f"{what} raises RankLost, but its message does not name the group: {error}") from error
    except Exception as error:
        raise Fault(f"{what} raises {describe_exception(error)}, not srv.errors.RankLost") from error
    else:
        raise Fault(f"{what} ends without an error")
    if seconds > group.timeout_s + SLACK_S:
        raise Fault(f"{what} raises RankLost after {seconds:.1f} s; RankGroup.timeout_s is {group.timeout_s:g} s")
    return seconds


if __name__ == "__main__":
    sys.exit(main())

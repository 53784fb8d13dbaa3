"""One rank of the checks of communicators: it performs the tasks that `srv.testing.conformance.ranks` requests.

Started as `python -m srv.testing.conformance.rank_process FD`, like `srv.testing.conformance.child`. A request is an
object with "task" and "group", an answer an object with "fault" (empty if there is none) and the results of the task.
Every rank calls the same operations in the same order; rank 1 is the one that is late or stays away.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.errors import RankLost
from srv.platform.capabilities import COLLECTIVES
from srv.platform.contract import join
from srv.platform.interface import AttentionBatch, Communicator, GraphKey
from srv.testing.conformance.bench import Bench, difference
from srv.testing.conformance.child import describe_exception, serve
from srv.testing.conformance.collectives import SHAPES, Members, numbers
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.setups import AttentionSetup, declared_dtypes, dtype_of, select_setups

SLACK_S = 5.0
_LATE_RANK = 1  # the rank that is late, or stays away
_EAGER = ("send_recv",)  # what captured steps need not have
_LATE_S = 0.3  # how much later it enters the barrier


def main() -> int:
    tasks = _Tasks()
    return serve(tasks.respond)


class _Tasks:
    """The tasks of one rank, in their order. Communicators are kept from one task to the next."""

    def __init__(self) -> None:
        self._joined: list[Communicator] = []

    def respond(self, request: str, kit: Kit) -> dict[str, Any]:
        """The results of one task, or the fault that it found."""
        task = json.loads(request)
        tasks: Mapping[str, Callable[[Kit, RankGroup], dict[str, Any]]] = {
            "operations": self.operations,
            "capture": self.capture,
            "lose": self.lose,
            "leave": self.leave,
        }
        try:
            return {"fault": "", **tasks[task["task"]](kit, RankGroup(**task["group"]))}
        except Fault as fault:
            return {"fault": fault.message}
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            return {"fault": f"it raised {describe_exception(error)}", "lost": isinstance(error, RankLost)}

    def operations(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Join the group, and call every operation; then join a second one, and use both."""
        self._joined = [communicator := join(kit.platform, group, kit.capabilities)]
        if group.rank == _LATE_RANK:
            time.sleep(_LATE_S)
        entered = time.monotonic()
        communicator.barrier()
        left = time.monotonic()
        sums = Members(kit, communicator, group).check()
        self._use_two_groups(kit, group)
        return {"entered": entered, "left": left, "sums": sums.digests, "cases": sums.cases}

    def _use_two_groups(self, kit: Kit, group: RankGroup) -> None:
        """All ranks, and those but rank 1 (of two, both) in the opposite order, take turns; then the second is left."""
        [first] = self._joined
        members = [rank for rank in reversed(range(group.size)) if rank != _LATE_RANK or group.size == 2]
        dtype = dtype_of(declared_dtypes(kit)[0])
        if kit.rank in members:
            other = replace(group, name=f"{group.name}-of-some", rank=members.index(kit.rank), size=len(members))
            second = join(kit.platform, other, kit.capabilities)
            for _ in range(2):
                Members(kit, second, other).check_moves((3,), dtype, "one of two groups")
                Members(kit, first, group).check_moves((3,), dtype, "the other of two groups")
            second.abort()
        else:
            for _ in range(2):
                Members(kit, first, group).check_moves((3,), dtype, "the other of two groups")
        Members(kit, first, group).check_moves((3,), dtype, "a group that was joined before one that was aborted")

    def capture(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Join the group, and replay a captured step."""
        setups = select_setups(kit, max_page_sizes=1, captured=True)
        self._joined = [communicator := join(kit.platform, group, kit.capabilities)]
        for setup in setups:
            _check_captured(kit, setup, communicator, group)
        return {"summary": "; ".join(str(setup) for setup in setups)}

    def lose(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Join another group of the same name, which needs what `abort` releases; rank 1 stays away afterwards.

        Rank 0 then waits for a sum, and, in a group of another name, for what rank 1 does not send.
        """
        operations = [_sum, *([_receive] if "send_recv" in kit.capabilities else [])]
        seconds = []
        for index, operation in enumerate(operations):
            one = replace(group, name=f"{group.name}-{index}" if index else group.name)
            communicator = join(kit.platform, one, kit.capabilities)
            self._joined.append(communicator)
            communicator.barrier()
            inputs = [numbers(rank, SHAPES[1], dtype_of(declared_dtypes(kit)[0])) for rank in range(group.size)]
            what = "a group that was joined after another one was aborted"
            Members(kit, communicator, one).check_reduce(inputs, what)
            if group.rank != _LATE_RANK:
                seconds.append(_lose(kit, communicator, one, operation))
        if group.rank == _LATE_RANK:
            return {}
        return {"summary": f"a rank that stayed away was reported after {max(seconds):.1f} s"}

    def leave(self, kit: Kit, group: RankGroup) -> dict[str, Any]:
        """Abort, whether or not an operation has failed."""
        for communicator in self._joined:
            communicator.abort()
        self._joined = []
        return {}


def _check_captured(kit: Kit, setup: AttentionSetup, communicator: Communicator, group: RankGroup) -> None:
    """A captured step with attention and the operations that steps may have, replayed with other inputs.

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
        products = gathered * (group.rank + 1)
        if "all_to_all" in kit.capabilities:
            gathered = gathered + communicator.all_to_all(products.flatten(0, 1)).view(out.shape)
        if "reduce_scatter" in kit.capabilities:
            gathered = gathered + communicator.reduce_scatter(products.flatten(0, 1))
        if "broadcast" in kit.capabilities:
            gathered = gathered + communicator.broadcast(hidden.clone(), group.size - 1)
        return out.copy_(gathered.add_(communicator.all_reduce(hidden)))

    operations = ", ".join(name for name in COLLECTIVES if name in kit.capabilities and name not in _EAGER)
    with torch.inference_mode():
        metadata = plan()
        communicator.barrier()
        output = graphs.capture(GraphKey("decode", 1), run)
        for factor in (1.0, 3.0):
            source.fill_(factor * (group.rank + 1))
            graphs.replay(GraphKey("decode", 1), [plan()])
            inputs, own = torch.arange(1, group.size + 1).double() * factor, group.rank + 1
            want = inputs + inputs.sum()
            for capability, more in (
                ("all_to_all", inputs * own),
                ("reduce_scatter", inputs.sum() * own),
                ("broadcast", inputs[-1]),
            ):
                want = want + more if capability in kit.capabilities else want
            error = difference(output.to("cpu"), want.view(-1, 1, 1, 1).expand(out.shape), setup.dtype)
            if error:
                raise Fault(f"{setup}: a replayed step with all_gather ({operations}) gives {error}")


def _sum(kit: Kit, communicator: Communicator) -> Tensor:
    return communicator.all_reduce(torch.ones(3, device=kit.device))


def _receive(kit: Kit, communicator: Communicator) -> Tensor:
    return communicator.recv(torch.ones(3, device=kit.device), _LATE_RANK)


def _lose(
    kit: Kit, communicator: Communicator, group: RankGroup, operation: Callable[[Kit, Communicator], Tensor]
) -> float:
    """The seconds after which an operation that the other rank does not join raises RankLost."""
    what, started = f"{operation.__name__.lstrip('_')}: an operation that a rank does not join", time.monotonic()
    try:
        operation(kit, communicator).to("cpu")
    except RankLost as error:
        seconds = time.monotonic() - started
        if group.name not in str(error):
            raise Fault(f"{what} raises RankLost, but its message does not name the group: {error}") from error
    except Exception as error:
        raise Fault(f"{what} raises {describe_exception(error)}, not srv.errors.RankLost") from error
    else:
        raise Fault(f"{what} ends without an error")
    if not group.timeout_s / 2 <= seconds <= group.timeout_s + SLACK_S:
        raise Fault(f"{what} raises RankLost after {seconds:.1f} s; RankGroup.timeout_s is {group.timeout_s:g} s")
    return seconds


if __name__ == "__main__":
    sys.exit(main())

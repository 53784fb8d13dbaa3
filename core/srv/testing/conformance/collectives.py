"""The laws of collective operations, as one rank checks them together with all others.

    sums         all_reduce, reduce_scatter                     declared dtypes, int32, int64
    moved        all_gather, all_to_all, broadcast, send_recv   these, int16 and uint8

Every rank calls the same operations in the same order. Inputs of all ranks follow from their numbers, so that each rank
knows what it must get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.platform.interface import Communicator
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import declared_dtypes

SHAPES = ((1,), (3, 37), (16, 1024), (257, 129))  # of sums in floats
_SUMMED = ("int32", "int64")  # besides the declared dtypes
_MOVED = (*_SUMMED, "int16", "uint8")
_MOVED_SHAPES = ((0,), (1,), (2, 0), (5, 37))


@dataclass(frozen=True, slots=True)
class Sums:
    """What the ranks compare: of each case, its name and a digest of the bits of `all_reduce`."""

    cases: Sequence[str]
    digests: Sequence[str]


def numbers(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The input of a rank, on the host. Floats of different magnitudes, so that rounding depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return (torch.randn(tuple(shape), generator=generator) * 10.0**rank).to(dtype)
    return torch.randint(0, 120, tuple(shape), generator=generator).to(dtype)


def _dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Members:
    """A group as one of its ranks sees it. Operations are checked if the platform declares their capability."""

    def __init__(self, kit: Kit, communicator: Communicator, group: RankGroup) -> None:
        self._kit, self._communicator = kit, communicator
        self._rank, self._size = group.rank, group.size

    def check(self) -> Sums:
        """All operations, and what they must refuse."""
        sums = self.check_sums()
        for dtype in (*declared_dtypes(self._kit), *_MOVED):
            for shape in _MOVED_SHAPES:
                self.check_moves(shape, _dtype_of(dtype), f"{dtype} {list(shape)}")
        self._check_refusals()
        return sums

    def check_sums(self) -> Sums:
        floats = [(shape, dtype) for dtype in declared_dtypes(self._kit) for shape in SHAPES]
        cases = [*floats, *(((3, 37), dtype) for dtype in _SUMMED), ((0, 4), floats[0][1])]
        digests = []
        for shape, dtype in cases:
            inputs, what = self._inputs(shape, _dtype_of(dtype)), f"{dtype} {list(shape)}"
            digests.append(self.check_reduce(inputs, what))
            if self._has("reduce_scatter"):
                self._check_scatter(self._inputs((self._size * shape[0], *shape[1:]), _dtype_of(dtype)), what)
        return Sums([f"{dtype} {list(shape)}" for shape, dtype in cases], digests)

    def check_moves(self, shape: Sequence[int], dtype: torch.dtype, what: str) -> None:
        inputs = self._inputs(shape, dtype)
        self.check_gather(inputs, what)
        if self._has("all_to_all"):
            self._check_even(shape, dtype, what)
            for rows in (lambda i, j: (i + 2 * j) % 4, lambda i, j: 3 * (j == 1), lambda i, j: 0):
                self._check_uneven(rows, shape, dtype, what)
        if self._has("broadcast"):
            for source in range(self._size):
                own = self._on_device(inputs)
                returned = self._communicator.broadcast(own, source)
                self._same_object(returned, own, f"broadcast of {what}")
                self._expect(own, inputs[source], f"broadcast of {what}", f"the tensor of rank {source}")
        if self._has("send_recv"):
            self._check_pass(inputs, what)

    def check_gather(self, inputs: Sequence[Tensor], what: str) -> None:
        own = self._on_device(inputs)
        gathered = self._communicator.all_gather(own)
        wanted = "the tensors of all members in the order of their ranks"
        self._expect(gathered, torch.stack(list(inputs)), f"all_gather of {what}", wanted)
        if not torch.equal(own.to("cpu"), inputs[self._rank]):
            raise Fault(f"all_gather of {what} changes its argument")

    def check_reduce(self, inputs: Sequence[Tensor], what: str) -> str:
        """A digest of the sum, which the ranks compare."""
        own = self._on_device(inputs)
        self._same_object(self._communicator.all_reduce(own), own, f"all_reduce of {what}")
        total = own.to("cpu")
        self._expect_sum(total, inputs, f"all_reduce of {what}")
        return hashlib.sha256(total.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()

    def _check_scatter(self, inputs: Sequence[Tensor], what: str) -> None:
        part = self._communicator.reduce_scatter(self._on_device(inputs, transposed=True))
        parts = [each.view(self._size, -1, *each.shape[1:])[self._rank] for each in inputs]
        self._check_kind(part, parts[0], f"reduce_scatter of {what}")
        self._expect_sum(part.to("cpu"), parts, f"reduce_scatter of {what}")

    def _check_even(self, shape: Sequence[int], dtype: torch.dtype, what: str) -> None:
        inputs = self._inputs((self._size * shape[0], *shape[1:]), dtype)
        received = self._communicator.all_to_all(self._on_device(inputs, transposed=True))
        blocks = [each.view(self._size, *shape)[self._rank] for each in inputs]
        wanted = "the rows that each rank has for this one, in the order of ranks"
        self._expect(received, torch.cat(blocks), f"all_to_all of {what}", wanted)

    def _check_uneven(
        self, rows: Callable[[int, int], int], shape: Sequence[int], dtype: torch.dtype, what: str
    ) -> None:
        """rows(i, j): how many rank i has for rank j."""
        table = [[rows(i, j) for j in range(self._size)] for i in range(self._size)]
        inputs = [numbers(rank, (sum(row), *shape), dtype) for rank, row in enumerate(table)]
        received = self._communicator.all_to_all_uneven(
            self._on_device(inputs), table[self._rank], [row[self._rank] for row in table]
        )
        wanted = [torch.split(each, row)[self._rank] for each, row in zip(inputs, table, strict=True)]
        what = f"all_to_all_uneven of rows {list(shape)} of {what}, {table} of them"
        self._expect(received, torch.cat(wanted), what, "the rows that each rank has for this one")

    def _check_pass(self, inputs: Sequence[Tensor], what: str) -> None:
        """Each rank sends to the next one; rank 0 does first, and the others receive first."""
        own, into = self._on_device(inputs, transposed=True), self._on_device(inputs)
        target, source = (self._rank + 1) % self._size, (self._rank - 1) % self._size

        def receive() -> None:
            self._same_object(self._communicator.recv(into, source), into, f"recv of {what}")

        if self._rank:
            receive()
        self._communicator.send(own, target)
        if not self._rank:
            receive()
        self._expect(into, inputs[source], f"recv of {what}", f"the tensor that rank {source} sends")

    def _check_refusals(self) -> None:
        """What one rank alone can know to be wrong is refused before it waits for others."""
        wide = torch.ones(4, 6, device=self._kit.device, dtype=_dtype_of(declared_dtypes(self._kit)[0])).T
        odd, other = wide.T.contiguous().view(-1)[: self._size + 1], (self._rank + 1) % self._size
        calls: list[tuple[str, str, Callable[[], Any]]] = [
            ("communicator", "all_reduce of a transposed tensor", lambda: self._communicator.all_reduce(wide)),
            ("broadcast", "broadcast of a transposed tensor", lambda: self._communicator.broadcast(wide, 0)),
            ("send_recv", "recv into a transposed tensor", lambda: self._communicator.recv(wide, other)),
            ("reduce_scatter", "reduce_scatter of too many rows", lambda: self._communicator.reduce_scatter(odd)),
            ("all_to_all", "all_to_all of too many rows", lambda: self._communicator.all_to_all(odd)),
            (
                "all_to_all",
                "all_to_all_uneven with other rows than it has",
                lambda: self._communicator.all_to_all_uneven(odd, [0] * self._size, [0] * self._size),
            ),
        ]
        for capability, what, call in calls:
            if self._has(capability):
                try:
                    call()
                except ValueError:
                    continue
                raise Fault(f"{what} raises no ValueError")

    def _has(self, capability: str) -> bool:
        return capability in self._kit.capabilities

    def _inputs(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        return [numbers(rank, shape, dtype) for rank in range(self._size)]

    def _on_device(self, inputs: Sequence[Tensor], transposed: bool = False) -> Tensor:
        """This rank's input: a view that does not begin where its memory does, and, if asked for, not contiguous."""
        own = inputs[self._rank]
        if transposed and own.dim() > 1:
            return own.transpose(0, 1).contiguous().to(self._kit.device).transpose(0, 1)
        memory = torch.cat([own.new_zeros(3), own.view(-1)]).to(self._kit.device)
        return memory[3:].view(own.shape)

    def _same_object(self, returned: object, own: Tensor, what: str) -> None:
        if returned is not own:
            raise Fault(f"{what} returns another tensor than its argument, which it must replace")

    def _expect(self, result: object, wanted: Tensor, what: str, described: str) -> None:
        self._check_kind(result, wanted, what)
        assert isinstance(result, Tensor)
        if not torch.equal(result.to("cpu"), wanted):
            raise Fault(f"{what} does not return {described}")

    def _check_kind(self, result: object, wanted: Tensor, what: str) -> None:
        if not isinstance(result, Tensor) or result.dtype != wanted.dtype or result.shape != wanted.shape:
            shown = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
            raise Fault(f"{what} returns {shown}, not {wanted.dtype} {list(wanted.shape)}")
        if not same_device(result.device, self._kit.device):
            raise Fault(f"{what} returns a tensor on {result.device}, not on {self._kit.device}")

    def _expect_sum(self, total: Tensor, inputs: Sequence[Tensor], what: str) -> None:
        """Exact for integers; for floats, as far as rounding explains it."""
        exact = torch.stack(list(inputs)).double()
        rounding = torch.finfo(total.dtype).eps if total.dtype.is_floating_point else 0.0
        error, bound = (total.double() - exact.sum(0)).abs(), rounding * exact.abs().sum(0)
        if not bool((error <= bound).all()):
            raise Fault(f"{what} is off by {float(error.max()):.3g}; rounding explains {float(bound.max()):.3g}")

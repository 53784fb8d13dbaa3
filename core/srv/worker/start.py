"""The two ledgers of a rank: what its memory takes, line by line, and how long each phase of its start took.

    start = RankStart(...)
    with start.phase("weights", line="weights"):  ──► a phase, and an error that names the wrong line if memory runs out
        ...
    start.ledger.measure(name, bytes)              ──► the measured figure of a line

This module must not know what is allocated, only what the platform counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from srv.errors import OutOfMemory, is_out_of_memory
from srv.executor.spec import EngineSpec
from srv.io.memory_lines import ACTIVATIONS
from srv.io.phases import Phases
from srv.planning.budget import Budget
from srv.planning.ledger import RUNTIME, Ledger, predict
from srv.platform.interface import MemoryUse, Platform

_NO_FIGURE = "this platform has no figure for what a process has allocated"


class RankStart:
    """The ledgers of one rank. `attach` comes as soon as there is a platform."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self.phases = Phases()
        self.ledger = Ledger(predict(spec.config, spec.model, spec.reserved_parts))
        self._platform: Platform | None = None
        self._device = torch.device("meta")
        self._capabilities: frozenset[str] = frozenset()
        self._ready_bytes: int | None = None  # allocated when the start was complete
        self._counts_peak = False

    def attach(self, platform: Platform, device: torch.device, capabilities: frozenset[str]) -> None:
        """Measure from here on. Only in host memory is there a figure for the runtime: what is resident by now."""
        self._platform, self._device, self._capabilities = platform, device, capabilities
        use = self.use()
        if use is not None and "host_memory" in self._capabilities:
            self.ledger.measure(RUNTIME, use.now, "resident before weights are loaded")
        else:
            self.ledger.measure(RUNTIME, None, "drivers report the memory of all processes together")

    def use(self, *, reset_peak: bool = False) -> MemoryUse | None:
        """What this process has allocated on the device; None if the platform does not say."""
        if self._platform is None or "memory_use" not in self._capabilities:
            return None
        return self._platform.memory_use(self._device, reset_peak)

    def expect(self, budget: Budget) -> None:
        """Predict again, with the pool of this budget."""
        self.ledger.expect(predict(self._spec.config, self._spec.model, self._spec.reserved_parts, budget))

    @contextmanager
    def phase(
        self, name: str, line: str, predicted: tuple[float, str] | None = None, does: str = "computing"
    ) -> Iterator[None]:
        """A phase of the start in which the line `line` is allocated."""
        with self.phases.run(name, predicted, does), self.guard(line):
            yield

    @contextmanager
    def growth(self, line: str) -> Iterator[None]:
        """Measure a line by what the process allocates inside."""
        before = self.use()
        yield
        self.measure_growth(line, before)

    def measure_growth(self, line: str, before: MemoryUse | None, known: int = 0) -> None:
        """Measure a line by what the process has more than `before`, without `known` bytes that other lines count."""
        after = self.use()
        if before is None or after is None:
            self.ledger.measure(line, None, _NO_FIGURE)
        else:
            self.ledger.measure(line, max(after.now - before.now - known, 0), self._how())

    @contextmanager
    def guard(self, line: str) -> Iterator[None]:
        """Where memory runs out inside, raise the error that names the line that was wrong."""
        try:
            yield
        except Exception as error:
            self.explain(line, error)
            raise

    def explain(self, line: str, error: Exception) -> None:
        """Raise the error that names the line that was wrong, if `error` says that memory has run out."""
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            return
        free = None if self._platform is None else self._platform.memory(self._device).free
        raise self.ledger.exhausted(line, error, free) from error

    def complete(self) -> None:
        """Everything is allocated: from now on, a peak is that of steps."""
        use = self.use(reset_peak=True)
        self._ready_bytes = None if use is None else use.now
        self._counts_peak = use is not None and use.peak is not None
        if use is None:
            self.ledger.measure(ACTIVATIONS, None, _NO_FIGURE)
        elif use.peak is None:
            self.ledger.measure(ACTIVATIONS, None, "this platform has no figure for the peak of a step")
        else:
            self.ledger.measure(ACTIVATIONS, None, "measured once steps have run: see /get_server_info")
        for each in self.ledger.lines:
            if each.measured is None and not each.note:
                self.ledger.measure(each.name, None, "it has no figure of its own")

    @property
    def counts_peak(self) -> bool:
        """Whether `peak_of_steps` has a figure; known once the start is complete."""
        return self._counts_peak

    def peak_of_steps(self) -> int | None:
        """Bytes that steps have needed at most, beyond what the start allocated; None if that is not known."""
        use = self.use()
        if use is None or use.peak is None or self._ready_bytes is None:
            return None
        return max(use.peak - self._ready_bytes, 0)

    def _how(self) -> str:
        if "host_memory" in self._capabilities:
            return "by resident memory, with what was freed and not given back"
        return "by the allocator of the device"

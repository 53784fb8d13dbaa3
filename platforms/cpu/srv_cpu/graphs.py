"""Captured steps: the platform's side of `srv.platform.interface.Graphs`, by tapes of native kernel calls.

A step's kernels take less time than Python needs to call them, at few rows; a tape calls them from C++.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from srv_cpu.native_attention import Step
from srv_kernels.cpu.tape import Arena, Tape


class CpuGraphs:
    """Tapes by key, over one arena: core replays one at a time and keeps no result past the next."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._tapes: dict[int, Tape] = {}

    def capture(self, key: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        with Tape(self._arena) as tape:
            output = run()
        self._tapes[key] = tape
        return output

    def replay(self, key: int, metadata: Step) -> None:
        """The lengths lie where the recorded attention reads them: `plan` has put them there."""
        self._tapes[key].run()

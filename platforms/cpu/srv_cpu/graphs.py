"""Captured steps: the platform's side of `srv.platform.interface.Graphs`, by tapes of native kernel calls.

A step's kernels take less time than Python needs to call them, at few rows; a tape calls them from C++.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from srv_cpu.native_attention import Step
from srv_kernels.cpu.tape import Arena, NotRecordable, Tape

logger = logging.getLogger(__name__)


class CpuGraphs:
    """What replays a step, by key: tapes over one arena, as core keeps no result past the next replay.

    A step that is mostly torch's own operators, as transformers' models are, is called again instead: on a tape
    they would take as long, and the memory of all that they make. It reads the same storages, so the outcome is the
    same.
    """

    def __init__(self) -> None:
        self._arena = Arena()
        self._replays: dict[int, Callable[[], object]] = {}

    def capture(self, key: int, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        tape = Tape(self._arena)
        why = ""
        try:
            with tape:
                output = run()
        except NotRecordable as error:
            why, output = str(error), run()
        if not why and tape.torch_calls > tape.native_calls:
            why = f"{tape.torch_calls} of its operators are torch's, {tape.native_calls} native"
        if why:
            logger.info("the step of %d rows is not recorded but called again: %s", key, why)
        self._replays[key] = run if why else tape.run
        return output

    def replay(self, key: int, metadata: Step) -> None:
        """The lengths lie where the recorded attention reads them: `plan` has put them there."""
        self._replays[key]()

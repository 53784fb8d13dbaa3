"""Counts how many tokens choose each expert, in steps that run eagerly.

    MoE.forward ── ids [T, K] ──► the counts of the step [layers, experts] ── end_step ──┬─► those of the last steps
                                                                                         └─► the load of all steps

The counts are on the device, and are copied to the host when they are read. While they are made, no step is captured or
compiled, because padding would be counted; they are the same on all ranks, which choose alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from srv.args.groups.experts import ExpertsArgs
from srv.commands import (
    Answer,
    ExpertCommand,
    ExpertCounts,
    ExpertLoad,
    ExpertUsage,
    ReadExpertCounts,
    ReadExpertLoad,
    StartExpertCounts,
    StopExpertCounts,
)
from srv.models.modules.feed_forward import MoE

PER_PASS = "per_pass"


class _Steps(NamedTuple):
    """counts: int64 [layers, experts], of so many steps, of which `step` is the last."""

    step: int
    steps: int
    tokens: int
    counts: Tensor


class _Load:
    """How evenly experts are used, added up on the device over all steps."""

    def __init__(self, counts: Tensor) -> None:
        self._experts = counts.shape[1]
        self._assigned, self._busiest = torch.zeros_like(counts[:, 0]), torch.zeros_like(counts[:, 0])

    def add(self, counts: Tensor) -> None:
        """counts: those of one step, [layers, experts]."""
        self._assigned += counts.sum(1)
        self._busiest += counts.amax(1)

    def read(self, layers: Sequence[int]) -> ExpertLoad:
        mean = [assigned / self._experts for assigned in self._assigned.tolist()]
        return ExpertLoad(list(layers), mean, self._busiest.tolist())


class ExpertRecorder:
    """The counts of one rank. `layers`: by their numbers. `mode`: "stat" or "per_pass". `size`: steps that are kept.

    `size` None: all steps, added up in one table if the mode is "stat".
    """

    def __init__(self, layers: dict[int, MoE], mode: str, size: int | None, device: torch.device) -> None:
        self._recording = False
        self._load: _Load | None = None
        self._layers, self._mode = layers, mode
        experts = max(layer.experts.sizes.experts for layer in layers.values())
        self._counts = torch.zeros((len(layers), experts), dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._adds_up = mode != PER_PASS and size is None
        self._kept: deque[_Steps] = deque(maxlen=1 if self._adds_up else size)

    @property
    def counts_steps(self) -> bool:
        """Whether the experts of steps are counted now."""
        return self._recording or self._load is not None

    def measure_load(self) -> None:
        """Count the experts of all steps from now on. Call it when no step is captured or timed any more."""
        self._load = _Load(self._counts)
        self._observe()

    def run(self, command: ExpertCommand) -> Answer:
        match command:
            case StartExpertCounts():
                if self._recording:
                    return Answer(error="a record is being made already; stop it first")
                self._kept.clear()
                self._counts.zero_()
                self._recording = True
                self._observe()
            case StopExpertCounts():
                if not self._recording:
                    return Answer(error="no record is being made")
                self._recording = False
                self._observe()
            case ReadExpertCounts():
                return Answer(experts=self._read())
            case ReadExpertLoad():
                return Answer(expert_load=None if self._load is None else self._load.read(list(self._layers)))
        return Answer()

    def end_step(self, step: int, tokens: int) -> None:
        """Keep the counts of a step whose forward pass is enqueued."""
        if self._load is not None:
            self._load.add(self._counts)
        if self._recording:
            self._keep(step, tokens)
        self._counts.zero_()

    def _keep(self, step: int, tokens: int) -> None:
        counts, steps = self._counts.clone(), 1
        if self._adds_up and self._kept:
            before = self._kept.pop()
            counts, steps, tokens = before.counts.add_(counts), before.steps + 1, before.tokens + tokens
        self._kept.append(_Steps(step, steps, tokens, counts))

    def _observe(self) -> None:
        for row, layer in enumerate(self._layers.values()):
            layer.observe = partial(self._count, self._counts[row]) if self.counts_steps else None

    def _count(self, counts: Tensor, ids: Tensor) -> None:
        chosen = ids.reshape(-1)
        counts.scatter_add_(0, chosen, self._one.expand(len(chosen)))

    def _read(self) -> ExpertUsage:
        kept = list(self._kept)
        self._kept.clear()
        records = kept if self._mode == PER_PASS else _added_up(kept)
        shown = [ExpertCounts(each.step, each.steps, each.tokens, each.counts.tolist()) for each in records]
        return ExpertUsage(self._mode, self._recording, list(self._layers), shown)


def _added_up(kept: Sequence[_Steps]) -> list[_Steps]:
    if not kept:
        return []
    counts = torch.stack([each.counts for each in kept]).sum(0)
    return [_Steps(kept[-1].step, sum(each.steps for each in kept), sum(each.tokens for each in kept), counts)]


def make_recorder(model: nn.Module, experts: ExpertsArgs, device: torch.device) -> ExpertRecorder | None:
    """None if nothing is to be recorded."""
    mode, size = experts.expert_distribution_recorder_mode, experts.expert_distribution_recorder_buffer_size
    if mode is None:
        return None
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    layers = {int(layer.experts.prefix.split(".layers.")[1].split(".")[0]): layer for layer in found.values()}
    return ExpertRecorder(layers, mode, None if size == -1 else size, device)

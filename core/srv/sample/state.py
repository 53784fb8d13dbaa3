"""The sampler's state of each slot: sampling parameters on the host, and the state of processors on the device.

Must not know scheduling: the model runner starts and ends slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from srv.platform.transfers import Transfers
from srv.sample.masks import AllowedTokens, BadWords
from srv.sample.processors import LogitBias, LogitsProcessor, MinTokens, Penalties
from srv.sched.plan import Start
from srv.types import SamplingParams


class SamplerState:
    """Per-slot state. `extra` processors run after the built-in ones (a grammar mask, say).

    `params[slot]` is None if no request generates tokens in the slot. `version` changes with every start and end, so
    that callers can cache values that they derive from the state. The arrays have, for each slot, the fields of
    `SamplingBatch`: temperature, top_p, min_p (float32), top_k (int32; no limit: the vocabulary size), and the seed
    (int64).
    """

    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        end_tokens: frozenset[int],
        transfers: Transfers,
        extra: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.max_slots, self.vocab_size, self.transfers = max_slots, vocab_size, transfers
        self.params: list[SamplingParams | None] = [None] * max_slots
        self.version = 0
        self.temperature = np.zeros(max_slots, dtype=np.float32)
        self.top_k = np.full(max_slots, vocab_size, dtype=np.int32)
        self.top_p = np.ones(max_slots, dtype=np.float32)
        self.min_p = np.zeros(max_slots, dtype=np.float32)
        self.seed = np.zeros(max_slots, dtype=np.int64)
        self.processors: tuple[LogitsProcessor, ...] = (
            Penalties(vocab_size, transfers),
            LogitBias(transfers),
            AllowedTokens(vocab_size, transfers),
            BadWords(transfers),
            MinTokens(vocab_size, end_tokens, transfers),
            *extra,
        )

    def start(self, start: Start) -> None:
        """Start a request in a slot. Replaces state that the slot still has after a failed step."""
        slot, params = start.slot, start.request.params
        self.end(slot)
        if not isinstance(params, SamplingParams):
            return
        self.params[slot] = params
        self.version += 1
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = params.temperature, params.top_p, params.min_p
        self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.seed[slot] = params.seed
        for processor in self.processors:
            processor.start(start, params)

    def end(self, slot: int) -> None:
        """End the request of the slot. Does nothing if the slot is not in use, because its start may have failed."""
        self.params[slot] = None
        self.version += 1
        for processor in self.processors:
            processor.end(slot)

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """Count tokens[i] as output of slots[i] if kept[i]; all on the device. `Sampler.sample_drafts` calls this."""
        for processor in self.processors:
            processor.observe_kept(slots, tokens, kept)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Count tokens[i], int64 on the device, as output of slots[i]. `Sampler.sample` calls this."""
        for processor in self.processors:
            processor.observe(slots, tokens)

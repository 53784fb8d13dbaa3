"""Logit processors of other distributions, which requests choose by name (`--enable-custom-logit-processor`).

Owns their base class, one object per request, and their faults: a processor that raises, or returns something else than
logits, ends its own request and no other. Must not know what a processor does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from srv.sample.processors import SampleRow
from srv.sample.third_party import PROCESSORS, ProcessorFacts
from srv.sample.verify import DraftRows
from srv.sched.plan import Start
from srv.types import SamplingParams

logger = logging.getLogger(__name__)


class RequestProcessor:
    """Changes the logits of one request. Subclass it and override `process`.

    It sees neither other requests nor the tokens that were sampled, so that steps overlap and drafts are verified as
    without it. With several ranks each has its own object, and all must compute the same.
    """

    def __init__(self, params: Mapping[str, Any], vocab_size: int, device: torch.device) -> None:
        """`params`: the request's `custom_params`, which `ProcessorFacts.refusal` has accepted."""
        self.params, self.vocab_size, self.device = params, vocab_size, device

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        """New logits for float32 [positions, vocab] on the device: -inf excludes a token. It must not synchronize."""
        raise NotImplementedError


class CustomProcessors:
    """A `srv.sample.processors.LogitsProcessor` for the processors of all requests."""

    def __init__(self, processors: Mapping[str, ProcessorFacts], vocab_size: int, device: torch.device) -> None:
        """Imports every class. Raises PluginError for one that cannot be imported."""
        self._vocab_size, self._device = vocab_size, device
        self._classes = {
            name: PROCESSORS.import_class(name, "target", facts.target, RequestProcessor, built_in=False)
            for name, facts in processors.items()
        }
        self._active: dict[int, RequestProcessor | None] = {}  # slot -> its processor; None: it could not be made

    def start(self, start: Start, params: SamplingParams) -> None:
        if not params.custom_processor:
            return
        custom_params = msgspec.json.decode(params.custom_params or "{}")
        try:
            self._active[start.slot] = self._classes[params.custom_processor](
                custom_params, self._vocab_size, self._device
            )
        except Exception:
            logger.exception("the logit processor %s could not be made", params.custom_processor)
            self._active[start.slot] = None

    def end(self, slot: int) -> None:
        self._active.pop(slot, None)

    def prepare(self, rows: Sequence[SampleRow]) -> list[tuple[int, int, int]] | None:
        """(slot, first row, number of rows) of each request concerned; None without any."""
        if not self._active:
            return None
        runs: list[tuple[int, int, int]] = []
        for index, row in enumerate(rows):
            if row.slot not in self._active:
                continue
            if runs and runs[-1][0] == row.slot:
                runs[-1] = (row.slot, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((row.slot, index, 1))
        return runs or None

    def apply(self, logits: torch.Tensor, prepared: list[tuple[int, int, int]]) -> None:
        for slot, begin, count in prepared:
            rows = logits.narrow(0, begin, count)
            result = self._processed(self._active[slot], rows)
            if result is None:
                rows.fill_(float("nan"))  # ends the request with an error
            else:
                rows.copy_(result)

    def _processed(self, processor: RequestProcessor | None, rows: torch.Tensor) -> torch.Tensor | None:
        """The new logits; None if the processor fails."""
        if processor is None:
            return None
        try:
            result = processor.process(rows.clone())
        except Exception:
            logger.exception("the logit processor %s failed", type(processor).__name__)
            return None
        if isinstance(result, torch.Tensor) and result.shape == rows.shape and result.device == rows.device:
            return result
        logger.error("the logit processor %s returned no logits of shape %s", type(processor).__name__, (*rows.shape,))
        return None

    def apply_drafts(self, logits: torch.Tensor, prepared: list[tuple[int, int, int]], drafts: DraftRows) -> None:
        self.apply(logits, prepared)

    def observe(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """A processor does not see sampled tokens."""

    def observe_kept(self, slots: Sequence[int], tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """See `observe`."""

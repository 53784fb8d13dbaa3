"""The processors themselves, which a worker imports."""

from __future__ import annotations

import torch

from srv.sample.custom import RequestProcessor


class Only(RequestProcessor):
    """Excludes every token but one."""

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(logits, float("-inf"))
        token = int(self.params["token"])
        kept[:, token] = logits[:, token]
        return kept


class Broken(RequestProcessor):
    """Fails on every step."""

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        raise ValueError("this processor is broken")

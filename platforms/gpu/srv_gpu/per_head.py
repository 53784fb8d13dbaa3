"""Numbers of a layer's query heads on the device: the slopes of ALiBi and the scores of sinks."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from srv.platform.transfers import Transfers


class PerHead:
    """Uploads such numbers once, when they are first seen. Captured steps keep reading them, so that they stay."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._uploaded: dict[tuple[float, ...], Tensor] = {}

    def upload(self, numbers: tuple[float, ...] | None) -> Tensor | None:
        """float32 [heads]; None for None."""
        if numbers is None:
            return None
        if numbers not in self._uploaded:
            self._uploaded[numbers] = self._transfers.upload(np.array(numbers, np.float32))
        return self._uploaded[numbers]

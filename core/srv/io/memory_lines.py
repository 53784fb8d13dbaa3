"""One line of the memory ledger, as ranks report it (`srv.planning.ledger`)."""

from __future__ import annotations

import msgspec

TOLERANCE = 0.05
"""A line whose measured figure differs by more than this share of its prediction is off."""

ACTIVATIONS = "activations"
"""The line that is measured while steps run."""


class MemoryLine(msgspec.Struct, frozen=True):
    """Bytes. `predicted` None: no claim is made. `measured` None: there is no figure, and `note` says why."""

    name: str
    predicted: int | None
    measured: int | None = None
    note: str = ""

    @property
    def excess(self) -> float | None:
        """By what share of the prediction the measured figure is larger; None without one of the two."""
        if self.measured is None or self.predicted is None:
            return None
        return (self.measured - self.predicted) / max(self.predicted, 1)

    @property
    def off(self) -> bool:
        """Whether both figures exist and differ by more than `TOLERANCE`."""
        return self.excess is not None and abs(self.excess) > TOLERANCE

    def to_dict(self) -> dict[str, object]:
        """JSON-compatible values; `excess` as in the property."""
        excess = None if self.excess is None else round(self.excess, 4)
        return {**msgspec.structs.asdict(self), "excess": excess}

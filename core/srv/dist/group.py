"""A group of ranks as a value: who belongs to it, how its members meet, and the share of each.

    share of 6 heads among 3 ranks      0 1 │ 2 3 │ 4 5
    share of 2 heads among 4 ranks      0 │ 0 │ 1 │ 1         fewer units than ranks: neighbours hold copies

Must not know devices or collectives: `srv.platform.interface.Communicator` has those.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that compute each layer together (tensor parallelism), as seen by its member `rank` of `size`.

    `name` identifies the group in logs and errors, and in its directory: no two groups of an engine have the same name.
    Some libraries take at most 32 characters. `directory`: a private directory of this host, new for each engine,
    through which the members find one another; "" for a group of one. `timeout_s`: how long a collective operation
    waits for the other members; while the engine starts it may wait `start_timeout_s`.
    """

    name: str = "tensor"
    rank: int = 0
    size: int = 1
    directory: str = ""
    timeout_s: float = 0.0
    start_timeout_s: float = 0.0

    def share(self, total: int, unit: int = 1) -> tuple[int, int]:
        """The range [begin, end) of `total` elements that this member holds, in whole units of `unit` elements.

        Raises ValueError if the units can neither be divided among the members nor be copied evenly.
        """
        units, rest = divmod(total, unit)
        if rest or not is_divisible(units, self.size):
            raise ValueError(f"{total} elements in units of {unit} cannot be divided among {self.size} ranks")
        if units >= self.size:
            each = units // self.size
            return self.rank * each * unit, (self.rank + 1) * each * unit
        index = self.rank * units // self.size
        return index * unit, (index + 1) * unit


def is_divisible(units: int, ranks: int) -> bool:
    """Whether each rank can hold equally many units, or each unit can be held by equally many ranks."""
    return units % ranks == 0 or ranks % units == 0

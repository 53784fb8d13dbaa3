"""How many cells were run on a device, how many less than that, and how many are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from srv_matrix.records import Level, Record


class Counts(NamedTuple):
    """Cells of one kind on one variant. `run`: on a device of it. `forced`: on a newer one, with its code path forced.

    `simulated`: on a simulated device, compiled, or only started with. `accepted`: by the rules of a launch alone.
    """

    run: int
    forced: int
    simulated: int
    accepted: int
    refused: int

    @classmethod
    def of(cls, records: Iterable[Record]) -> Counts:
        counts = dict.fromkeys(cls._fields, 0)
        for record in records:
            counts[_class_of(record)] += 1
        return cls(**counts)

    def __str__(self) -> str:
        forced = f", {self.forced} on a newer device with its code path forced" if self.forced else ""
        return (
            f"of {sum(self)} arguments, {self.run} were run on the device{forced}, {self.simulated} were simulated, "
            f"compiled or only started with, {self.accepted} are accepted but were not run, {self.refused} are refused"
        )


def _class_of(record: Record) -> str:
    if not record.status.works:
        return "refused"
    if record.verified:
        return "forced" if record.forced else "run"
    return "simulated" if record.level is Level.E3 else "accepted"

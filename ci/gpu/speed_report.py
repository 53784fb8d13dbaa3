"""What a run has measured about speed, as JSON and as rows for docs/performance.md.

Owns the comparison with the floors. On a simulated device there are no ceilings and no times: every row says
"simulated" instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from engine_speed import Measured
from speed_floors import Shape, verdict

_COLUMNS = ("measurement", "attention", "steps", "ms", "floor, ms", "share of the floor", "tokens/s", "aim")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device itself does: a copy within its memory, and products of bfloat16 matrices. And its memory."""

    bytes_per_s: float
    operations_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """All of one run. passed_over: why a configuration was not measured, or not completely."""

    shape: Shape
    ceilings: Ceilings | None
    measured: Sequence[Measured]
    passed_over: Mapping[str, str]

    def floor_s(self, measured: Measured) -> float | None:
        if self.ceilings is None:
            return None
        if measured.kind == "prefill":
            return self.shape.prefill_floor_s(measured.size, self.ceilings.operations_per_s)
        return self.shape.decode_floor_s(measured.size, measured.context, self.ceilings.bytes_per_s)

    def share(self, measured: Measured) -> float | None:
        """The floor divided by the measured time."""
        floor = self.floor_s(measured)
        return None if floor is None or measured.seconds is None else floor / measured.seconds

    def as_json(self) -> dict[str, object]:
        return {
            "shape": asdict(self.shape),
            "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "measured": [
                asdict(measured) | {"floor_s": self.floor_s(measured), "share": self.share(measured)}
                for measured in self.measured
            ],
            "passed_over": dict(self.passed_over),
        }


def aim_name(measured: Measured) -> str:
    """The key of `speed_floors.AIMS`."""
    return "prefill" if measured.kind == "prefill" else f"decode {measured.size}"


def markdown(speed: Speed) -> str:
    """The ceilings, one row per measurement, and what was passed over."""
    lines = [_ceilings(speed), ""] if speed.ceilings else []
    lines += [
        _row(_COLUMNS),
        _row(["---"] * len(_COLUMNS)),
        *(_row(_cells(speed, measured)) for measured in speed.measured),
    ]
    if speed.passed_over:
        lines += ["", "Not measured:", "", *(f"- {name}: {why}" for name, why in speed.passed_over.items())]
    return "\n".join(lines) + "\n"


def _ceilings(speed: Speed) -> str:
    assert speed.ceilings is not None
    copied, multiplied = speed.ceilings.bytes_per_s / 1e9, speed.ceilings.operations_per_s / 1e12
    weights, token = speed.shape.step_bytes / 1e9, speed.shape.kv_bytes / 1e3
    return (
        f"Ceilings measured in the same run: {copied:,.0f} GB/s copied within device memory (read and written), "
        f"{multiplied:,.0f} TFLOP/s in products of bfloat16 matrices. A decode step reads "
        f"{weights:.2f} GB of weights, and {token:.0f} kB per token of context."
    )


def _cells(speed: Speed, measured: Measured) -> list[str]:
    if measured.kind == "prefill":
        name, steps = f"prefill of {measured.size:,}", "one prompt"
    else:
        name = f"decode, batch {measured.size}, context {measured.context:,.0f}"
        steps = "replayed" if measured.replayed else "eager"
    share, floor = speed.share(measured), speed.floor_s(measured)
    if share is None or floor is None or measured.seconds is None:
        return [name, measured.attention, steps, *["simulated"] * 4, ""]
    tokens = measured.size / measured.seconds
    figures = [f"{measured.seconds * 1e3:.2f}", f"{floor * 1e3:.2f}", f"{share:.0%}", f"{tokens:,.0f}"]
    return [name, measured.attention, steps, *figures, verdict(aim_name(measured), share)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def summary(speed: Speed) -> str:
    """One line: the best share of each measurement that has an aim."""
    if speed.ceilings is None:
        return f"simulated: {len(speed.measured)} measurements ran, without times"
    best: dict[str, tuple[float, str]] = {}
    for measured in speed.measured:
        name, share = aim_name(measured), speed.share(measured)
        if share is not None and verdict(name, share):
            best[name] = max(best.get(name, (0.0, "")), (share, measured.attention))
    verdicts = [
        f"{name} {share:.0%} ({attention}), {verdict(name, share)}" for name, (share, attention) in best.items()
    ]
    return "; ".join(verdicts) or "nothing with an aim was measured"

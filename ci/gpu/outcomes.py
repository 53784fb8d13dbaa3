"""How a stage ended, its figure, and the final table. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

PASSED, PASSED_OVER, FAILED, TIMED_OUT = "passed", "passed over", "FAILED", "TIMED OUT"
STATUS_PASSED_OVER = 3  # with which a command says that it cannot run here, and why
_LONGEST = 300  # characters of a figure
_KIT = re.compile(r"^\w+ \(.*\): (.+)$")
_PYTEST = re.compile(r"^(?:=+ )?(.*\d+ (?:passed|failed|skipped|error).*?)(?: =+)?$")
# The line with the command, and what the simulator's process prints when it ends.
_NOISE = ("== ", "nanobind:", " - leaked", " - ...", "See https://nanobind")


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a stage. figure: what it found, in one line. simulated: whether its device was. device: "cuda"."""

    stage: str
    what: str
    outcome: str
    seconds: float
    figure: str
    simulated: bool
    device: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in (PASSED, PASSED_OVER)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def outcome_of(status: int | None) -> str:
    """The outcome for an exit status; None if the time was over."""
    if status is None:
        return TIMED_OUT
    return {0: PASSED, STATUS_PASSED_OVER: PASSED_OVER}.get(status, FAILED)


def figure_of(stage: str, text: str) -> str:
    """The figure in what a stage has printed: the summary of the kit or of pytest, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
    kit = dict.fromkeys(("conformance", "ops", "attention", "engine", "sweep"), _KIT)
    pattern = {**kit, "kernels": _PYTEST, "evidence": _PYTEST}.get(stage)
    if pattern is not None:
        lines = [match[1] for line in lines if (match := pattern.match(line))] or lines
    return lines[-1][:_LONGEST] if lines else ""


def markdown(results: Sequence[Result]) -> str:
    """One row per stage."""
    rows = [("stage", "outcome", "seconds", "figure"), ("---", "---", "---:", "---")]
    for result in results:
        figure = result.figure.replace("|", "/")
        if result.simulated:
            figure = f"simulated; {figure}" if figure else "simulated"
        rows.append((f"{result.stage}: {result.what}", result.outcome, f"{result.seconds:.0f}", figure))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

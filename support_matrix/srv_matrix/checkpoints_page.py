"""The page of published checkpoints: sizes, formats, and what a plan says of each on each platform."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from srv_matrix.checkpoints import MACHINES, Checkpoint, Verdicts
from srv_matrix.marks import ACCEPTED, GENERATED, RUN, SIMULATED, escape, text_of
from srv_matrix.matrix import Matrix
from srv_matrix.records import Evidence, Level

NAME = "published.md"
Levels = Mapping[tuple[str, str], Level]  # of features at places
_ABOUT = (
    "Checkpoints that people run, by their names on the Hub, with the parameters in their files and their storage. "
    "What is said of each platform is the verdict of `srv plan` on its config.json alone, in bfloat16: "
    "whose layers compute it, and on how many devices of one machine, as few as have memory for it; or why a launch is "
    "refused. No checkpoint of this page was run for it: the sign tells whether small models of its architecture, "
    "stored with its method, were."
)
_KEY = (
    f"{RUN} run on the device · {SIMULATED} simulated, compiled or started · {ACCEPTED} accepted, not run · ✕ refused. "
    "[Index](index.md)."
)


def checkpoints_page(matrix: Matrix) -> str:
    """Which checkpoints are served where, and where their facts come from."""
    lines = [GENERATED, "# Published models", "", _ABOUT, "", _KEY, "", *_machines(), "", *_table(matrix), ""]
    if popular := [checkpoint for checkpoint, _ in matrix.checkpoints if checkpoint.wanted]:
        lines += ["## Not served as they should be", ""]
        lines += [f"- `{checkpoint.id}`: {checkpoint.wanted}" for checkpoint in popular] + [""]
    if more := [checkpoint for checkpoint, _ in matrix.checkpoints if checkpoint.more]:
        lines += ["## Parameters that are not loaded", ""]
        lines += [f"- `{checkpoint.id}` counts {checkpoint.more}." for checkpoint in more] + [""]
    lines += ["## Sources", "", *_sources(matrix)]
    return text_of(lines)


def _machines() -> Iterator[str]:
    machines = ", ".join(f"`{machine}`" for machine in MACHINES.values())
    yield f"The machines, as `srv plan --device` takes them: {machines}."


def _table(matrix: Matrix) -> Iterator[str]:
    heads = [place.replace(":", ": ") for place in MACHINES]
    yield " | ".join(["Checkpoint", "Parameters", "Weights", "Further files", *heads])
    yield " | ".join(["---", "---:", "---", "---", *[":-:"] * len(heads)])
    levels = _levels(matrix.evidence)
    for checkpoint, verdicts in matrix.checkpoints:
        others = ", ".join(escape(form) for form in checkpoint.formats if form != "safetensors")
        cells = [f"`{checkpoint.id}`", _amount(checkpoint.parameters), checkpoint.weights, others or "-"]
        yield " | ".join((*cells, *(_cell(levels, checkpoint, verdicts, place) for place in MACHINES)))


def _cell(levels: Levels, checkpoint: Checkpoint, verdicts: Verdicts, place: str) -> str:
    verdict = verdicts.places[place]
    if verdict.codes:
        return "✕ " + ", ".join(f"`{code}`" for code in verdict.codes)
    method = checkpoint.weights if checkpoint.is_quantized else "safetensors"
    level = levels.get((f"model:{verdicts.architecture}/{method}", place))
    sign = ACCEPTED if level is None or level < Level.E3 else SIMULATED if level is Level.E3 else RUN
    return f"{sign if verdict.layers == 'native' else ACCEPTED} {verdict.layers}, {verdict.ranks}"


def _levels(evidence: Iterable[Evidence]) -> Levels:
    """The highest level of a test that passed, by the feature that it covers and the place."""
    levels: dict[tuple[str, str], Level] = {}
    for line in evidence:
        if line.outcome == "passed":
            for feature in line.covers:
                key = feature, f"{line.platform}:{line.variant}"
                levels[key] = max(line.level, levels.get(key, line.level))
    return levels


def _amount(parameters: int) -> str:
    billions = parameters / 1e9
    return (
        f"{billions:,.1f} B"
        if billions >= 10
        else f"{billions:.3g} B"
        if billions >= 1
        else f"{parameters / 1e6:.3g} M"
    )


def _sources(matrix: Matrix) -> Iterator[str]:
    yield "Checkpoint | config.json | Parameters"
    yield "--- | --- | ---"
    for checkpoint, _ in matrix.checkpoints:
        yield f"`{checkpoint.id}` | {escape(checkpoint.source)} | {escape(checkpoint.size_source)}"

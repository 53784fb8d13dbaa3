"""The page of published checkpoints: sizes, formats, and what a plan says of each on each platform."""

from __future__ import annotations

from collections.abc import Iterator

from srv_matrix.checkpoints import MACHINES, Checkpoint, Verdict, Verdicts
from srv_matrix.marks import ACCEPTED, GENERATED, RUN, SIMULATED, escape, look_of, text_of
from srv_matrix.matrix import Matrix

NAME = "published.md"
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
    if wanted := [each for each, _ in matrix.checkpoints if each.wanted]:
        lines += ["## Not served as they should be", ""]
        lines += [f"- `{each.id}`: {each.wanted}" for each in wanted] + [""]
    if more := [each for each, _ in matrix.checkpoints if each.more]:
        lines += ["## Parameters that are not loaded", ""]
        lines += [f"- `{each.id}` counts {each.more}." for each in more] + [""]
    lines += ["## Sources", "", *_sources(matrix)]
    return text_of(lines)


def _machines() -> Iterator[str]:
    machines = ", ".join(f"`{each}`" for each in MACHINES.values())
    yield f"The machines, as `srv plan --device` takes them: {machines}."


def _table(matrix: Matrix) -> Iterator[str]:
    heads = [place.replace(":", ": ") for place in MACHINES]
    yield " | ".join(["Checkpoint", "Parameters", "Weights", "Further files", *heads])
    yield " | ".join(["---", "---:", "---", "---", *[":-:"] * len(heads)])
    for checkpoint, verdicts in matrix.checkpoints:
        others = ", ".join(escape(each) for each in checkpoint.formats if each != "safetensors")
        cells = [f"`{checkpoint.id}`", _amount(checkpoint.parameters), checkpoint.weights, others or "-"]
        yield " | ".join((*cells, *(_cell(matrix, checkpoint, verdicts, place) for place in MACHINES)))


def _cell(matrix: Matrix, checkpoint: Checkpoint, verdicts: Verdicts, place: str) -> str:
    verdict = verdicts.places[place]
    if verdict.codes:
        return "✕ " + ", ".join(f"`{code}`" for code in verdict.codes)
    return f"{_sign(matrix, checkpoint, verdicts, place, verdict)} {verdict.layers}, {verdict.ranks}"


def _sign(matrix: Matrix, checkpoint: Checkpoint, verdicts: Verdicts, place: str, verdict: Verdict) -> str:
    """The sign of the architecture with this method of quantization, or as safetensors without one."""
    platform, _, variant = place.partition(":")
    quantized = f"model:{verdicts.architecture}/{checkpoint.weights}"
    plain = f"model:{verdicts.architecture}/safetensors"
    is_quantized = checkpoint.config.get("quantization_config") is not None
    record = matrix.cell(quantized if is_quantized else plain, platform, variant)
    found = record is not None and verdict.layers == "native" and record.status.works
    return look_of(record).glyph if record is not None and found else ACCEPTED


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
    for each, _ in matrix.checkpoints:
        yield f"`{each.id}` | {escape(each.source)} | {escape(each.size_source)}"

"""Published checkpoints: their facts, and the verdict of a plan on each, which is recorded.

`support_matrix/published/checkpoints` has a file of facts per vendor, `sources.toml` with where they come from, and
`verdicts.jsonl`, which `srv matrix checkpoints` writes: whoever commits it has reviewed its diff. Plans are made from
configurations alone, on described devices; nothing here reads weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec

from srv.args.sources import gather_keywords
from srv.args.statement import UserInput
from srv.errors import Refusal
from srv.planning.kernel import layers_name
from srv.planning.plan import LaunchPlan, make_plan
from srv.planning.target import find_target
from srv_matrix.repository import MatrixError, read_toml

# Where plans are made: "platform:variant" -> one machine. Those of Ascend are Atlas 800I A2 and A3.
MACHINES: Mapping[str, str] = {
    "cpu:avx512": "cpu:avx512,memory=1024GiB",
    "cuda:sm90": "cuda:sm90,count=8",
    "rocm:gfx942": "rocm:gfx942,count=8",
    "npu:a2": "npu:a2,count=8",
    "npu:a3": "npu:a3,count=16",
}
_SOURCES, _VERDICTS = "sources.toml", "verdicts.jsonl"
_TOO_SMALL = "pool_too_small"
_Row = TypeVar("_Row")
REMEDY = "run `srv matrix checkpoints`, and review what it changes"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published checkpoint. `id`: on the Hub. `config`: the fields of its config.json that decide what happens.

    `parameters`: as published. `source`, `size_source`: "NAME: PLACE" of sources.toml, several separated by "; ".
    `more`: what the published parameters count that srv does not load. `wanted`: what should happen, and does not yet.
    `arguments`: of the launch, beside the model.
    """

    id: str
    source: str
    parameters: int
    size_source: str
    formats: tuple[str, ...]
    config: dict[str, Any]
    more: str = ""
    wanted: str = ""
    arguments: dict[str, Any] = {}

    @property
    def is_quantized(self) -> bool:
        return any(part.get("quantization_config") for part in self._parts)

    @property
    def weights(self) -> str:
        """How its linear layers are stored, as config.json says."""
        methods = [(part.get("quantization_config") or {}).get("quant_method") for part in self._parts]
        dtypes = [part.get(name) for part in self._parts for name in ("torch_dtype", "dtype")]
        return next((str(method) for method in (*methods, *dtypes) if method), "not stated")

    @property
    def _parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.config, self.config.get("text_config") or {}


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a plan says on one machine: whose layers compute the model on how many ranks, or the codes of refusals."""

    layers: str = ""
    ranks: int = 1
    codes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(self.codes) or f"{self.layers} on {self.ranks}"


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Those of one checkpoint by place. `architecture`: of the layers that srv makes, which for a model with a vision
    tower may be those of its language model. `parameters`: what srv counts; None if it claims no size."""

    id: str
    architecture: str
    parameters: int | None
    places: dict[str, Verdict]


def read_checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """The facts of all files, in alphabetical order; MatrixError if one is damaged, or a source is not listed."""
    sources = read_toml(folder / _SOURCES) if folder.exists() else {}
    files = sorted(path for path in folder.glob("*.jsonl") if path.name != _VERDICTS)
    rows = [row for path in files for row in _rows(path, Checkpoint)]
    for row in rows:
        cited = [text.partition(": ")[0] for text in (*row.source.split("; "), row.size_source)]
        if unknown := [name for name in cited if name not in sources]:
            raise MatrixError(f"{row.id} has the source {unknown[0]!r}, which {folder / _SOURCES} does not list")
    return tuple(sorted(rows, key=lambda row: row.id.lower()))


def read_verdicts(folder: Path) -> Mapping[str, Verdicts]:
    """The recorded verdicts by checkpoint; {} if none were recorded."""
    path = folder / _VERDICTS
    return {row.id: row for row in _rows(path, Verdicts)} if path.exists() else {}


def write_verdicts(folder: Path, verdicts: Sequence[Verdicts]) -> None:
    lines = [msgspec.json.encode(verdict).decode() + "\n" for verdict in verdicts]
    (folder / _VERDICTS).write_text("".join(lines), encoding="utf-8")


def _rows(path: Path, kind: type[_Row]) -> Iterator[_Row]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise MatrixError(f"{path} line {number} is not a {kind.__name__.lower()}: {error}") from error


def user_input(checkpoint: Checkpoint, folder: Path, place: str, ranks: int) -> UserInput:
    """A launch of the checkpoint in bfloat16 on the machine of a place, with its config.json in the folder."""
    (folder / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
    keywords = {"device": MACHINES[place], "model_path": str(folder), "load_format": "dummy", "dtype": "bfloat16"}
    return gather_keywords({**keywords, "tp_size": ranks, **checkpoint.arguments}, {}, "plan")


def plan(user: UserInput) -> tuple[LaunchPlan | None, tuple[str, ...]]:
    """The plan, if there is one, and the codes of its refusals in alphabetical order."""
    try:
        planned = make_plan(user, _target)
    except Refusal as refusal:
        return None, tuple(sorted({rejection.code for rejection in refusal.rejections}))
    return planned, tuple(sorted({rejection.code for rejection in planned.refusals}))


def plan_on(checkpoint: Checkpoint, folder: Path, place: str, ranks: int) -> Verdict:
    """The verdict on this number of ranks. Whether memory suffices is not said of what is refused for other reasons."""
    planned, codes = plan(user_input(checkpoint, folder, place, ranks))
    if codes:
        return Verdict(ranks=ranks, codes=tuple(code for code in codes if code != _TOO_SMALL) or codes)
    assert planned is not None
    return Verdict("native" if planned.kernels.layers == layers_name(native=True) else "transformers", ranks)


def verdict_on(checkpoint: Checkpoint, folder: Path, place: str) -> Verdict:
    """The verdict on as few ranks as have memory for the checkpoint: 1, 2, 4 and so on."""
    ranks = 1
    while (verdict := plan_on(checkpoint, folder, place, ranks)).codes == (_TOO_SMALL,):
        if 2 * ranks > _target(MACHINES[place]).device.count:
            break
        ranks *= 2
    return verdict


def verdicts_of(checkpoint: Checkpoint) -> Verdicts:
    """Plan a checkpoint everywhere."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        places = {place: verdict_on(checkpoint, folder, place) for place in MACHINES}
        planned, _ = plan(user_input(checkpoint, folder, next(iter(MACHINES)), 1))
    model = planned.model if planned else None
    architecture = model.architecture if model else str(checkpoint.config["architectures"][0])
    parameters = model.parameters if model else None
    return Verdicts(id=checkpoint.id, architecture=architecture, parameters=parameters, places=places)


def record(folder: Path, only: str = "") -> Iterator[str]:
    """Plan the checkpoints whose ids contain a text, write the verdicts, and yield a line for each that changed."""
    before, recorded = read_verdicts(folder), []
    for checkpoint in read_checkpoints(folder):
        old = before.get(checkpoint.id)
        recorded.append(verdicts_of(checkpoint) if old is None or only in checkpoint.id else old)
        if recorded[-1] != old:
            yield f"{checkpoint.id}: " + ", ".join(
                f"{place} {place_verdict}" for place, place_verdict in recorded[-1].places.items()
            )
    write_verdicts(folder, recorded)


_target = cache(find_target)

"""Every causal architecture of transformers, and what becomes of it: the recorded rows, their faults and their page.

`make architectures` records them with `tests/helpers/architectures_swept.py`: a tiny random model of each, in a real
engine. This module runs nothing, and must not import transformers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from srv.models.families.registry import BUILT_IN, built_in_native_names, find, is_native, runs_through_transformers
from srv_matrix.marks import GENERATED, escape, text_of
from srv_matrix.repository import MatrixError, Repository

NAME = "architectures.md"
REMEDY = "run `make architectures`"
OUTCOMES = {
    "equal": "its greedy tokens are those of transformers, in a batch and alone, with prompts in chunks",
    "different": "its greedy tokens differ from those of transformers",
    "refused": "a launch refuses it, with the reason below",
    "failed": "an error of another kind ends the launch",
    "uncomputed": "transformers itself computes no tokens of a small model",
}


# What the generic path cannot serve: what it is, by a part of the reason of a refusal.
LIMITS: Mapping[str, str] = {
    "Recurrent states or convolutions": r"recurrent|linear_attention|\(hybrid|\(conv|state_size|mamba|ssm_cfg|rwkv",
    "Keys chosen by an indexer or compressed": r"indexed_att|takes indices|latent,|a latent|compressed|sparse",
    "Attention sinks": r"takes s_aux|attention sinks",
    "Attention within chunks": r"attention within chunks",
    "Masks or biases of its own": r"builds its own attention mask|position_bias",
    "Layers that attend more than once": r"attends more than once|attends \d+ times in a pass",
    "Encoders and decoders": r"encoder-decoder|its attention is not causal|cross.attention",
    "Own attention in transformers": r"does not support attention backends",
    "A package that is not installed": r"ImportError",
    "A model that only assists another": r"only assists",
    "Audio, and patches of bytes": r"generates audio|patches of bytes",
}

# Layers that keep a state of each request; beside them, FULL names attention layers without traits.
RECURRENT, FULL = "recurrent", "full"


class ArchitectureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model type of transformers. `architecture`: its class. `declares`: the class says that it supports attention
    backends. `path`: "native", "generic", or "" if it is not served. `traits`: of its attention layers,
    and of recurrent ones. `parameters`: of the small model with the buffers that are loaded, and `planned`: what
    `srv plan` counts, or None if it claims no size."""

    model_type: str
    architecture: str
    declares: bool
    outcome: str
    path: str = ""
    traits: tuple[str, ...] = ()
    code: str = ""
    reason: str = ""
    parameters: int | None = None
    planned: int | None = None

    @property
    def limit(self) -> str | None:
        """Which of `LIMITS` its reason states."""
        if self.outcome == "equal":
            return None
        return next((name for name, pattern in LIMITS.items() if re.search(pattern, self.reason)), None)


class ArchitectureTable(msgspec.Struct, frozen=True):
    """The rows, and the release of transformers that they were recorded with."""

    transformers: str
    rows: tuple[ArchitectureRow, ...]

    def served(self, declared: bool) -> tuple[int, int]:
        """How many classes are served with equal tokens, of how many; `declared`: of those that declare backends.

        A class with several model types counts once, by the row of the first.
        """
        by_class: dict[str, ArchitectureRow] = {}
        for row in self.rows:
            if row.declares or not declared:
                by_class.setdefault(row.architecture, row)
        return sum(row.outcome == "equal" for row in by_class.values()), len(by_class)


def read_table(path: Path) -> ArchitectureTable | None:
    """The record: a line with the release, then the rows. None if there is no file; MatrixError if it is damaged."""
    if not path.exists():
        return None
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    try:
        release = json.loads(first)["transformers"]
        return ArchitectureTable(release, tuple(msgspec.json.decode(line, type=ArchitectureRow) for line in lines))
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise MatrixError(f"{path.name} is damaged ({error}): {REMEDY}") from error


def write_table(path: Path, table: ArchitectureTable) -> None:
    rows = sorted(table.rows, key=lambda row: row.model_type)
    lines = [json.dumps({"transformers": table.transformers}), *(msgspec.json.encode(row).decode() for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pinned_release(repository: Repository) -> str | None:
    """The release of transformers in constraints.txt; None if the file does not exist or pins none."""
    path = repository.root / "constraints.txt"
    if not path.exists():
        return None
    pin = re.search(r"^transformers==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return pin and pin[1]


def table_faults(table: ArchitectureTable | None, repository: Repository) -> Iterator[str]:
    """What is wrong with the record of a checkout, a sentence each.

    A checkout that pins a release of transformers must have a record of it, and a record must be of a pinned release.
    """
    pinned = pinned_release(repository)
    if table is None:
        if pinned is not None:
            yield f"{repository.architectures.name} is missing: {REMEDY}"
        return
    if pinned is None:
        yield f"{repository.architectures.name} cannot be compared: constraints.txt pins no release of transformers"
    elif table.transformers != pinned:
        yield f"{repository.architectures.name} is of transformers {table.transformers}, not {pinned}: {REMEDY}"
    for name, count in Counter(row.model_type for row in table.rows).items():
        if count > 1:
            yield f"{repository.architectures.name} has {count} rows of {name}: {REMEDY}"
    for row in table.rows:
        if row.outcome not in OUTCOMES:
            yield f"{repository.architectures.name} has the outcome {row.outcome!r} for {row.model_type}: {REMEDY}"
        elif row.outcome != "equal" and not row.reason:
            yield f"{repository.architectures.name} has no reason for {row.model_type}: {REMEDY}"


def architecture_page(table: ArchitectureTable) -> str:
    """One row per model type, then why the others are not served."""
    lines = [GENERATED, "# Architectures", ""]
    lines += [
        f"Every model type of transformers {table.transformers} with a causal class. A tiny random model of each was",
        "launched on the CPU in float32: with native layers where srv has them, else with the class of transformers on",
        "paged attention. Its greedy tokens were compared with those of transformers, for several requests in a batch",
        "and for each alone, with prompts computed in chunks. The last column has the `general.architecture` of GGUF",
        "files that are read.",
        "",
        "| Classes | Served with equal tokens | of |",
        "| --- | ---: | ---: |",
        *(_counted(table, declared) for declared in (True, False)),
        "",
        "| Model type | Class | Layers | Equal | Attention | GGUF |",
        "| --- | --- | --- | :---: | --- | --- |",
        *(_row(row) for row in table.rows),
        "",
        "## Why the others are not served",
        "",
        "A launch refuses them for these reasons, before weights are read where the configuration or the class shows",
        "them.",
        "",
        *_reasons(table.rows),
        *_known_sizes(),
    ]
    return text_of(lines)


def _known_sizes() -> Iterator[str]:
    """The architectures that have a file in srv, by what computes them."""
    others = [name for name in BUILT_IN if not is_native(name)]
    kinds = {
        "With native layers": built_in_native_names(),
        "Through transformers, as long as their layers use attention only": filter(runs_through_transformers, others),
        "Sizes only": (name for name in others if not runs_through_transformers(name)),
    }
    yield from ("## Known sizes", "")
    yield "`srv plan` shows the exact sizes of these classes from config.json alone, also of those that srv cannot run."
    for kind, names in kinds.items():
        yield from ("", f"{kind}: {', '.join(f'`{name}`' for name in sorted(names))}.")


def _counted(table: ArchitectureTable, declared: bool) -> str:
    which = "that declare support of attention backends" if declared else "all"
    equal, total = table.served(declared)
    return f"| {which} | {equal} | {total} |"


def _row(row: ArchitectureRow) -> str:
    equal = "✅ yes" if row.outcome == "equal" else "no"
    traits = ", ".join(trait.replace("_", " ") for trait in row.traits) or (FULL if row.path else "")
    architecture = find(row.architecture)
    layout = "" if architecture is None or architecture.gguf is None else f"`{architecture.gguf.name}`"
    return f"| `{row.model_type}` | `{row.architecture}` | {row.path or row.outcome} | {equal} | {traits} | {layout} |"


def _reasons(rows: Sequence[ArchitectureRow]) -> Iterator[str]:
    """By limit, one line per reason, with the model types that it applies to."""
    for limit in (*LIMITS, None):
        types_by_reason: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if row.outcome != "equal" and row.limit == limit:
                types_by_reason.setdefault((_general(row), row.code), []).append(f"`{row.model_type}`")
        if types_by_reason:
            yield from (f"### {limit or 'Other reasons'}", "")
            for (reason, code), types in sorted(types_by_reason.items(), key=lambda entry: -len(entry[1])):
                yield f"- {', '.join(types)}: {escape(reason)}" + (f" `[{code}]`" if code else "")
            yield ""


def _general(row: ArchitectureRow) -> str:
    """The reason without the names of this row, so that those of several rows are equal."""
    subject = rf"(model_path = FOLDER \(set by command line\): )?(model )?(FOLDER: )?\b{re.escape(row.architecture)}\b"
    text = re.sub(rf"{subject}( \(FOLDER\))?", "the model", row.reason)
    return re.sub(r" \[\w+\]$", "", text)

"""Command lines that vendors publish, and which of their flags a launch refuses.

`support_matrix/published/index.toml` lists the tables. The refusals are those of `srv args translate`: the rules of a
launch on that device, but for those about the files of a model.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from srv.args.dialects import translate
from srv.planning.translated import bad_values, launch_verdict
from srv_matrix.marks import GENERATED, escape, text_of
from srv_matrix.repository import MatrixError, read_toml

_LATER = re.compile(r"(--)?(speculative|disaggregation)[-_]")
_FEATURES = {"speculative": "drafts of a model", "disaggregation": "separate prefill and decode"}
_COLUMNS = ("id", "model", "weights", "variant", "cards", "role", "flags")


class Recipe(NamedTuple):
    """One published command line. `cards`: the devices of all servers of the recipe. `role`: of this server."""

    name: str
    model: str
    weights: str
    variant: str
    cards: int
    role: str
    flags: str


@dataclass(frozen=True)
class Recipes:
    """A published table of them, in the flags of an engine.

    `platform`: on which they run. `devices`: how many a machine has, by variant.
    """

    name: str
    title: str
    dialect: str
    platform: str
    devices: Mapping[str, int]
    rows: tuple[Recipe, ...]


def read_recipes(folder: Path) -> tuple[Recipes, ...]:
    """All tables of `index.toml` in the folder; MatrixError if one cannot be read."""
    index = folder / "index.toml"
    entries = read_toml(index).get("recipes", ()) if index.exists() else ()
    return tuple(_table(folder, entry) for entry in entries)


def _table(folder: Path, entry: Mapping[str, Any]) -> Recipes:
    try:
        rows = _rows(folder / entry["file"])
        return Recipes(entry["name"], entry["title"], entry["dialect"], entry["platform"], entry["devices"], rows)
    except KeyError as error:
        raise MatrixError(f"{folder / 'index.toml'}: recipes do not have the key {error}") from error


def _rows(path: Path) -> tuple[Recipe, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(_recipe(raw) for raw in csv.DictReader(file, strict=True))
    except (OSError, UnicodeError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise MatrixError(
            f"{path} cannot be read: {error!r}. It must be CSV in UTF-8 with the columns {', '.join(_COLUMNS)}"
        ) from error


def _recipe(raw: Mapping[str, str]) -> Recipe:
    name, model, weights, variant, cards, role, flags = (raw[column] for column in _COLUMNS)
    return Recipe(name, model, weights, variant, int(cards), role, flags)


def without_later(flags: str) -> str:
    """A line without its flags of drafts and of separate servers, and their values."""
    kept, dropped = list[str](), False
    for word in shlex.split(flags):
        if word.startswith("--"):
            dropped = _LATER.match(word) is not None
        if not dropped:
            kept.append(word)
    return shlex.join(kept)


def refused_by(recipes: Recipes, recipe: Recipe) -> Mapping[str, str]:
    """The flags or arguments for which a launch refuses a line, each with its first reason; {} if it is accepted."""
    translation = translate(recipes.dialect, shlex.split(recipe.flags), lambda device: None)
    machine = f"{recipes.platform}:{recipe.variant},count={recipes.devices[recipe.variant]}"
    verdict = launch_verdict(translation, machine)
    reasons: dict[str, str] = {}
    for rejection in (*translation.rejections, *bad_values(translation), *verdict.refusals):
        reasons.setdefault(rejection.what, rejection.reason)
    return reasons


def recipes_page(recipes: Recipes) -> str:
    """Which lines are accepted, and what the others are refused by."""
    printed = {recipe.name: refused_by(recipes, recipe) for recipe in recipes.rows}
    reduced = (recipe._replace(flags=without_later(recipe.flags)) for recipe in recipes.rows)
    refused = {recipe.name: refused_by(recipes, recipe) for recipe in reduced}
    as_printed, accepted = _accepted(printed), _accepted(refused)
    lines = [GENERATED, f"# {recipes.title}: command lines", ""]
    lines += [
        f"{len(refused)} lines, one per role of a server: {as_printed} are accepted as they are printed, and",
        f"{accepted} without their flags `--speculative-*` and `--disaggregation-*`, as the tables judge them.",
        "",
    ]
    lines += ["Not asked here: whether a model of that size fits, and how its files are quantized.", ""]
    lines += ["## By argument", "", *_by_argument(refused), ""]
    lines += ["## By line", "", *_by_line(recipes.rows, refused, printed)]
    return text_of(lines)


def _accepted(refused: Mapping[str, Mapping[str, str]]) -> int:
    return sum(not reasons for reasons in refused.values())


def _by_argument(refused: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    counts = Counter(name for reasons in refused.values() for name in reasons)
    reasons = {name: reason for of_line in refused.values() for name, reason in of_line.items()}
    yield from ("| Refused for | Lines | Reason |", "| --- | ---: | --- |")
    for name, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        yield f"| `{name}` | {count} | {escape(reasons[name])} |"


def _by_line(
    rows: Sequence[Recipe], refused: Mapping[str, Mapping[str, str]], printed: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    yield from (
        "| Line | Model | Weights | Device | Cards | Role | Refused for | As printed, also for |",
        "| --- | --- | --- | --- | ---: | --- | --- | --- |",
    )
    for row in rows:
        names = ", ".join(f"`{name}`" for name in refused[row.name]) or "accepted"
        further = ", ".join(dict.fromkeys(map(_feature, sorted(printed[row.name].keys() - refused[row.name].keys()))))
        cells = (row.name, row.model, row.weights, row.variant, row.cards, row.role, names, further or "-")
        yield f"| {' | '.join(map(str, cells))} |"


def _feature(argument: str) -> str:
    """What an argument belongs to that is left out, or its own name."""
    later = _LATER.match(argument)
    return f"`{argument}`" if later is None else _FEATURES[later[2]]

"""The initial placement of experts (`--init-expert-location`), read and checked against a model. Torch-free.

Owns the forms of the value, which are those of SGLang, inline or in a JSON file:

    trivial                                            each expert once, in order, in every layer
    {"physical_to_logical_map": [[2, 0, 1, 3], ...]}   the expert in each place, by layer
    {"logical_count": [[5, 0, 9, 1], ...]}             how many tokens chose each expert, by layer: what a placement
                                                       is calculated from

There is a row for each layer with experts, or for each layer of the model, as in SGLang; those of other layers are not
read. A record of srv (`/dump_expert_distribution_record`) is such a file, and names its `layers`; the counts of several
steps are added. Must not know ranks: which of them has which places is expert parallelism.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

from srv.errors import ModelError
from srv.models import derive
from srv.models.facts.special_layers import mixture
from srv.models.families.trees import native_tree_of_model
from srv.specs import ModelFacts

CODE = "expert_location"
TRIVIAL = "trivial"
MAP, COUNTS = "physical_to_logical_map", "logical_count"
_PASSES, _LAYERS = "passes", "layers"
_PICKLED = (".pt", ".pth", ".bin")
_TO_JSON = (
    "Convert it: `python -c \"import json, torch; d = torch.load('FILE', weights_only=True); "
    f"json.dump({{'{COUNTS}': d['{COUNTS}'].tolist()}}, open('FILE.json', 'w'))\"`"
)
_CORRECT = "Correct it, or leave --init-expert-location out"
_FLAG = "Correct --init-expert-location, or leave it out"


class Mixtures(NamedTuple):
    """The layers of a model that have experts, by number, and how many experts each has; `depth`: all its layers."""

    name: str
    layers: tuple[int, ...]
    depth: int
    experts: int


class ExpertMap(NamedTuple):
    """The expert in each place, by layer with experts; every expert has a place, and may have several."""

    mixtures: Mixtures
    places: tuple[tuple[int, ...], ...]

    @property
    def elsewhere(self) -> int:
        """Experts that are not where `trivial` has them, over all layers."""
        return sum(row.index(expert) != expert for row in self.places for expert in range(self.mixtures.experts))

    @property
    def copied(self) -> int:
        """Experts with more than one place, over all layers."""
        return sum(places > 1 for row in self.places for places in Counter(row).values())

    def __str__(self) -> str:
        mixtures = self.mixtures
        text = f"{len(self.places[0])} places for the {mixtures.experts} experts of each of {_layers_text(mixtures)}"
        if not self.elsewhere and not self.copied:
            return f"{text}, each expert where {TRIVIAL} has it"
        return f"{text}; {self.elsewhere} experts are not where {TRIVIAL} has them, and {self.copied} have copies"

    def to_dict(self) -> dict[str, Any]:
        places = {"places": len(self.places[0]), "elsewhere": self.elsewhere, "copied": self.copied}
        return {"layers": list(self.mixtures.layers), "experts": self.mixtures.experts, **places}


class LayerExpertCounts(NamedTuple):
    """How many tokens chose each expert, by layer with experts: what a placement would be calculated from."""

    mixtures: Mixtures
    tokens: tuple[tuple[float, ...], ...]

    @property
    def imbalance(self) -> float:
        """The tokens of the busiest expert of a layer, by the mean of its experts; the largest of all layers."""
        return max(max(row) * len(row) / sum(row) for row in self.tokens if sum(row))

    @property
    def total(self) -> float:
        return sum(map(sum, self.tokens))

    def __str__(self) -> str:
        mixtures = self.mixtures
        return (
            f"counts of {self.total:,.0f} choices among the {mixtures.experts} experts of each of"
            f" {_layers_text(mixtures)}, the "
            f"busiest with {self.imbalance:.1f} times the tokens of a mean one"
        )

    def to_dict(self) -> dict[str, Any]:
        counts = {"choices": self.total, "imbalance": self.imbalance}
        return {"layers": list(self.mixtures.layers), "experts": self.mixtures.experts, **counts}


ExpertLocation: TypeAlias = ExpertMap | LayerExpertCounts


def mixtures_of(model: ModelFacts, values: Mapping[str, Any]) -> Mixtures | None:
    """None if the model has no experts that native layers compute. `values`: set by the user."""
    moe, native = mixture(model, values), native_tree_of_model(model)
    if moe is None or isinstance(native, str):
        return None
    prefixes = (expert.prefix for expert in derive.model_ops(native, model.dtype).experts)
    layers = tuple(int(prefix.split(".layers.")[1].split(".")[0]) for prefix in prefixes)
    return Mixtures(model.name, layers, model.layers, moe.experts.count) if layers else None


def read_location(value: str, mixtures: Mixtures, redundant: int = 0) -> ExpertLocation:
    """The placement that a value asks for, or the counts that one is calculated from.

    `redundant`: places beside those for each expert once (ep_num_redundant_experts). Raises ModelError: not_found,
    damaged; and expert_location for what does not fit the model, and for files of torch.save.
    """
    places = mixtures.experts + redundant
    if value == TRIVIAL:
        row = tuple(place % mixtures.experts for place in range(places))
        return ExpertMap(mixtures, (row,) * len(mixtures.layers))
    what, content = _content(value)
    if (MAP in content) == (COUNTS in content or _PASSES in content):
        has = ", ".join(sorted(content)[:8]) or "no fields"
        _refuse(what, f"it needs either {MAP} or {COUNTS}, and has {has}")
    if MAP in content:
        return ExpertMap(mixtures, _map(what, content, mixtures, places))
    return LayerExpertCounts(mixtures, _counts(what, content, mixtures))


def _content(value: str) -> tuple[str, Mapping[str, Any]]:
    """What the value is called in messages, and the JSON object that it is, or that its file has."""
    inline = value.lstrip().startswith("{")
    what = "the JSON object" if inline else value
    try:
        content = json.loads(value if inline else _text(Path(value).expanduser(), value))
    except OSError as error:
        raise ModelError("not_found", what, f"it cannot be read ({error.strerror})", _FLAG) from error
    except (ValueError, RecursionError) as error:
        raise ModelError("damaged", what, f"it is not JSON ({error})", _CORRECT) from error
    if not isinstance(content, Mapping):
        _refuse(what, f"it is {_short(content)}, where a JSON object is expected")
    return what, content


def _text(path: Path, value: str) -> str:
    if path.suffix in _PICKLED:
        reason = "it is a file of torch.save, and a plan reads files without torch"
        raise ModelError(CODE, value, reason, _TO_JSON.replace("FILE", value))
    if not path.is_file():  # a pipe would be waited for, and can be read only once
        raise ModelError("not_found", value, f"it is neither {TRIVIAL}, nor a JSON object, nor a regular file", _FLAG)
    return path.read_text(encoding="utf-8")


def _map(what: str, content: Mapping[str, Any], mixtures: Mixtures, places: int) -> tuple[tuple[int, ...], ...]:
    if unknown := sorted(content.keys() - {MAP, _LAYERS}):
        _refuse(what, f"beside {MAP} it has {', '.join(unknown[:8])}, which says nothing of a placement")
    rows = []
    for layer, row in _rows(what, MAP, content.get(_LAYERS), content[MAP], mixtures):
        where = f"{MAP} of layer {layer}"
        if len(row) != places:
            needed = f"{mixtures.experts} experts"
            needed += f" and {places - mixtures.experts} redundant ones" if places > mixtures.experts else ""
            _refuse(what, f"{where} has {len(row)} places, and {mixtures.name} has {needed} (ep_num_redundant_experts)")
        for place, expert in enumerate(row):
            if type(expert) is not int or not 0 <= expert < mixtures.experts:
                last = mixtures.experts - 1
                _refuse(what, f"{where} has {_short(expert)} in place {place}, and experts are numbered 0 to {last}")
        if missing := sorted(set(range(mixtures.experts)) - set(row)):
            _refuse(what, f"{where} has no place for expert {missing[0]}")
        rows.append(tuple(row))
    return tuple(rows)


def _counts(what: str, content: Mapping[str, Any], mixtures: Mixtures) -> tuple[tuple[float, ...], ...]:
    """Those of all steps, added up."""
    layers, tables = content.get(_LAYERS), []
    for table in _tables(what, content):
        rows = []
        for layer, row in _rows(what, COUNTS, layers, table, mixtures):
            where = f"{COUNTS} of layer {layer}"
            if len(row) != mixtures.experts:
                _refuse(what, f"{where} has {len(row)} experts, and {mixtures.name} has {mixtures.experts}")
            for expert, tokens in enumerate(row):
                if not _is_count(tokens):
                    _refuse(what, f"{where} is {_short(tokens)} for expert {expert}; it must be a number of tokens")
            rows.append(row)
        tables.append(rows)
    added = tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in zip(*tables, strict=True))
    if not sum(map(sum, added)):
        _refuse(what, f"{COUNTS} has no tokens, from which no placement follows")
    return added


def _tables(what: str, content: Mapping[str, Any]) -> Sequence[Any]:
    """The counts of each step, [layers][experts]: of `passes`, or of one table, or several, in `logical_count`."""
    if _PASSES not in content:
        counts = content[COUNTS]
        several = isinstance(counts, list) and counts and isinstance(counts[0], list) and counts[0]
        return counts if several and isinstance(counts[0][0], list) else [counts]
    passes = content[_PASSES]
    if not isinstance(passes, list) or not all(isinstance(record, Mapping) and COUNTS in record for record in passes):
        _refuse(what, f"{_PASSES} is not a list of objects that have {COUNTS}")
    return [record[COUNTS] for record in passes]


def _rows(what: str, name: str, layers_field: Any, table: Any, mixtures: Mixtures) -> list[tuple[int, list[Any]]]:
    """The rows of the layers with experts. `layers_field`: the numbers of the layers that have rows, if it says so."""
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        _refuse(what, f"{name} is not a list of rows, one for each layer: {_short(table)}")
    mixture_layers = list(mixtures.layers)
    layers = (
        layers_field
        if layers_field is not None
        else mixture_layers
        if len(table) == len(mixture_layers)
        else list(range(mixtures.depth))
    )
    if layers_field is not None and layers_field != mixture_layers:
        _refuse(
            what,
            f"it is of the layers {_short(layers_field)}, and {_layers_text(mixtures)} of {mixtures.name} have experts",
        )
    if len(table) != len(layers):
        of_all = (
            f", or one for each of its {mixtures.depth} layers"
            if layers_field is None and mixtures.depth != len(mixture_layers)
            else ""
        )
        _refuse(
            what,
            f"{name} has {len(table)} rows, and {mixtures.name} needs {len(mixture_layers)}, for"
            f" {_layers_text(mixtures)}{of_all}",
        )
    return [(layer, row) for layer, row in zip(layers, table, strict=True) if layer in mixture_layers]


def _is_count(value: Any) -> bool:
    """Whether it may be a number of tokens, or a mean of such numbers; not if it is NaN."""
    return type(value) in (int, float) and 0 <= value < 2**63


def _layers_text(mixtures: Mixtures) -> str:
    first, last, count = mixtures.layers[0], mixtures.layers[-1], len(mixtures.layers)
    if count == 1:
        return f"layer {first}"
    return f"layers {first} to {last}" if last - first + 1 == count else f"{count} layers from {first} to {last}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(what: str, reason: str) -> NoReturn:
    raise ModelError(CODE, what, reason, _CORRECT)

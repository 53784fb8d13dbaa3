"""Judge every cell of platforms by the rules alone, before evidence and published tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from srv.args.config import ARGUMENTS
from srv.args.resolve import resolve
from srv.args.statement import UserInput
from srv.errors import Refusal
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts
from srv_matrix.build import judge_arguments
from srv_matrix.features import features
from srv_matrix.inventory import Inventory
from srv_matrix.records import Evidence, Record
from srv_matrix.sample import sample_models


class Judged(NamedTuple):
    """What follows from rules alone, before evidence: records of `arguments`, and of all other `features`.

    `unbuilt` and `defaults`: as in `Inventory` and `Matrix`.
    """

    manifests: tuple[Manifest, ...]
    arguments: tuple[Record, ...]
    features: tuple[Record, ...]
    unbuilt: Mapping[str, str]
    defaults: Mapping[tuple[str, str], Mapping[str, str]]


def judge(
    manifests: Iterable[Manifest],
    *,
    evidence: Sequence[Evidence] = (),
    models: Sequence[ModelFacts] = (),
    inventory: Inventory | None = None,
    methods: bool = True,
) -> Judged:
    """Judge every cell of these platforms, with `models` (default: `sample_models`), and of the numbers in evidence.

    `methods`: with quantized models of each architecture, which take about a second per platform.
    """
    manifests = tuple(manifests)
    models = models or sample_models()
    inventory = inventory or Inventory()
    defaults = {
        (manifest.name, variant): _defaults(manifest, variant)
        for manifest in manifests
        for variant in manifest.variants
    }
    arguments = judge_arguments(manifests, models, evidence)
    others = features(manifests, models, inventory, methods=methods)
    return Judged(manifests, arguments, others, inventory.unbuilt, defaults)


def _defaults(manifest: Manifest, variant: str) -> Mapping[str, str]:
    """The value of each argument on a variant if nothing is set and no model is known."""
    try:
        resolved = resolve(UserInput(), manifest=manifest, device=manifest.facts.profiles[variant])
    except Refusal:
        return {name: argument.show(argument.default) for name, argument in ARGUMENTS.items()}
    return {name: argument.show(resolved.config.get(name)) for name, argument in ARGUMENTS.items()}

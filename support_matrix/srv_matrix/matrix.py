"""The whole matrix: records by cell, platforms with their defaults, published tables and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from srv.args.config import ARGUMENTS
from srv.args.resolve import resolve
from srv.args.statement import UserInput
from srv.errors import Refusal
from srv.platform.manifest import Manifest
from srv.platform.registry import find_platforms
from srv.specs import ModelFacts
from srv_matrix.architectures import ArchitectureTable, read_table
from srv_matrix.build import judge_arguments, with_evidence, with_tables_and_evidence
from srv_matrix.evidence import read_folder
from srv_matrix.features import features, without_device_code
from srv_matrix.inventory import Inventory, observe_in_child
from srv_matrix.inventory import read as read_inventory
from srv_matrix.published import Table, read_tables
from srv_matrix.records import Evidence, Key, Kind, Record, by_key
from srv_matrix.reports import evidence_of, on_known_cells, read_reports, summary_of, with_reported_ops
from srv_matrix.repository import MatrixError, Repository
from srv_matrix.sample import sample_models

BUILT_IN = "srv"  # the distribution whose platforms are on the committed pages


@dataclass(frozen=True)
class Matrix:
    """Everything that pages show. `defaults`: (platform, variant) -> argument -> value as shown.

    `runs`: lines of Markdown that say how the evidence was obtained, if it is not that of this repository.
    `architectures`: those of transformers, None if they were not recorded.
    """

    manifests: tuple[Manifest, ...]
    records: Mapping[Key, Record]
    defaults: Mapping[tuple[str, str], Mapping[str, str]]
    tables: tuple[Table, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    runs: tuple[str, ...] = ()
    architectures: ArchitectureTable | None = None

    def cell(self, feature: str, platform: str, variant: str) -> Record | None:
        return self.records.get((feature, platform, variant))

    @cached_property
    def values(self) -> Mapping[Key, tuple[Record, ...]]:
        """The records of the values of each argument, by the argument's own cell."""
        found: dict[Key, list[Record]] = {}
        for record in self.records.values():
            if record.kind == "value":
                found.setdefault((record.argument, record.platform, record.variant), []).append(record)
        return {key: tuple(records) for key, records in found.items()}

    def of_kind(self, kind: Kind) -> Mapping[str, tuple[Record, ...]]:
        """The records of a kind by feature, in their original order."""
        found: dict[str, list[Record]] = {}
        for record in self.records.values():
            if record.kind == kind:
                found.setdefault(record.feature, []).append(record)
        return {feature: tuple(records) for feature, records in found.items()}

    def table_of(self, platform: str) -> Table | None:
        """The published table of a platform, if there is one."""
        return next((table for table in self.tables if table.platform == platform), None)


class Judged(NamedTuple):
    """What follows from rules alone, before evidence: records of `arguments`, and of all other `features`.

    `unbuilt` and `defaults`: as in `Inventory` and `Matrix`.
    """

    manifests: tuple[Manifest, ...]
    arguments: tuple[Record, ...]
    features: tuple[Record, ...]
    unbuilt: Mapping[str, str]
    defaults: Mapping[tuple[str, str], Mapping[str, str]]

    def shown(self, tables: Sequence[Table] = (), evidence: Sequence[Evidence] = ()) -> Matrix:
        """The matrix, with what others publish and with evidence."""
        others = with_evidence(self.features, evidence)
        arguments = without_device_code(with_tables_and_evidence(self.arguments, tables, evidence), self.unbuilt)
        return Matrix(self.manifests, by_key((*arguments, *others)), self.defaults, tuple(tables), tuple(evidence))


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
    defaults = {(each.name, variant): _defaults(each, variant) for each in manifests for variant in each.variants}
    arguments = judge_arguments(manifests, models, evidence)
    others = features(manifests, models, inventory, methods=methods)
    return Judged(manifests, arguments, others, inventory.unbuilt, defaults)


def make_matrix(
    manifests: Iterable[Manifest],
    *,
    tables: Sequence[Table] = (),
    evidence: Sequence[Evidence] = (),
    models: Sequence[ModelFacts] = (),
    inventory: Inventory | None = None,
    methods: bool = True,
) -> Matrix:
    """Judge every cell of these platforms, as `judge` does, and add evidence and published tables."""
    judged = judge(manifests, evidence=evidence, models=models, inventory=inventory, methods=methods)
    return judged.shown(tables, evidence)


def read_matrix(repository: Repository | None, platforms: Sequence[str] = ()) -> Matrix:
    """The matrix of a checkout: of the built-in platforms, or of the named `platforms` of any distribution."""
    found = find_platforms()
    if unknown := sorted(set(platforms) - found.keys()):
        raise MatrixError(f"there is no platform {', '.join(unknown)}; installed are {', '.join(found)}")
    chosen = [each for name, each in found.items() if name in platforms or not platforms]
    manifests = [each.loaded for each in chosen if platforms or each.distribution == BUILT_IN]
    if repository is None:
        return make_matrix(manifests)
    tables = read_tables(repository.published)
    inventory = read_inventory(repository.inventory)
    made = make_matrix(manifests, tables=tables, evidence=read_folder(repository.evidence), inventory=inventory)
    return replace(made, architectures=read_table(repository.architectures))


def read_plugin_matrix(platform: str, reports: Sequence[Path]) -> Matrix:
    """The matrix of one installed plugin, with the evidence of its conformance reports; needs no checkout."""
    found = find_platforms()
    if platform not in found:
        raise MatrixError(f"--plugin {platform}: there is no such platform; installed are {', '.join(found)}")
    manifest = found[platform].loaded
    read = read_reports(reports, platform)
    inventory = with_reported_ops(observe_in_child(core_only=True), read)
    judged = judge([manifest], inventory=inventory)
    testable = [key for key, record in judged.shown().records.items() if not record.values]
    evidence = on_known_cells((each for report in read for each in evidence_of(report)), testable)
    return replace(judged.shown(evidence=evidence), runs=tuple(map(summary_of, read)))


def _defaults(manifest: Manifest, variant: str) -> Mapping[str, str]:
    """The value of each argument on a variant if nothing is set and no model is known."""
    try:
        resolved = resolve(UserInput(), manifest=manifest, device=manifest.facts.profiles[variant])
    except Refusal:
        return {name: argument.show(argument.default) for name, argument in ARGUMENTS.items()}
    return {name: argument.show(resolved.config.get(name)) for name, argument in ARGUMENTS.items()}

"""The whole matrix: records by cell, platforms with their defaults, published tables and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from srv.platform.manifest import Manifest
from srv.platform.registry import find_platforms
from srv.specs import ModelFacts
from srv_matrix.architectures import ArchitectureTable, read_table
from srv_matrix.build import tested_numbers, with_evidence, with_tables_and_evidence
from srv_matrix.checkpoints import Checkpoint, Verdicts, read_checkpoints, read_verdicts
from srv_matrix.evidence import read_folder
from srv_matrix.features import without_device_code
from srv_matrix.inventory import Inventory, observe_in_child, to_json
from srv_matrix.inventory import read as read_inventory
from srv_matrix.judged import Judged, judge
from srv_matrix.kept import code_files, kept, key_of
from srv_matrix.published import Table, read_tables
from srv_matrix.recipes import Recipes, read_recipes
from srv_matrix.records import Evidence, Key, Kind, Record, by_key
from srv_matrix.reports import evidence_of, on_known_cells, read_reports, summary_of, with_reported_ops
from srv_matrix.repository import MatrixError, Repository

BUILT_IN = "srv"  # the distribution whose platforms are on the committed pages


@dataclass(frozen=True)
class _Kept:
    """What is kept of `Judged`; `defaults` by "platform:variant"."""

    arguments: tuple[Record, ...]
    features: tuple[Record, ...]
    defaults: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Matrix:
    """Everything that pages show. `defaults`: (platform, variant) -> argument -> value as shown.

    `runs`: lines of Markdown that say how the evidence was obtained, if it is not that of this repository.
    `architectures`: those of transformers, None if they were not recorded. `recipes`: command lines of vendors.
    `checkpoints`: published ones, with the verdicts that were recorded.
    """

    manifests: tuple[Manifest, ...]
    records: Mapping[Key, Record]
    defaults: Mapping[tuple[str, str], Mapping[str, str]]
    tables: tuple[Table, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    runs: tuple[str, ...] = ()
    architectures: ArchitectureTable | None = None
    recipes: tuple[Recipes, ...] = ()
    checkpoints: tuple[tuple[Checkpoint, Verdicts], ...] = ()

    def cell(self, feature: str, platform: str, variant: str) -> Record | None:
        return self.records.get((feature, platform, variant))

    @cached_property
    def values(self) -> Mapping[Key, tuple[Record, ...]]:
        """The records of the values of each argument, by the argument's own cell."""
        by_cell: dict[Key, list[Record]] = {}
        for record in self.records.values():
            if record.kind == "value":
                by_cell.setdefault((record.argument, record.platform, record.variant), []).append(record)
        return {key: tuple(records) for key, records in by_cell.items()}

    def of_kind(self, kind: Kind) -> Mapping[str, tuple[Record, ...]]:
        """The records of a kind by feature, in their original order."""
        by_feature: dict[str, list[Record]] = {}
        for record in self.records.values():
            if record.kind == kind:
                by_feature.setdefault(record.feature, []).append(record)
        return {feature: tuple(records) for feature, records in by_feature.items()}

    def table_of(self, platform: str) -> Table | None:
        """The published table of a platform, if there is one."""
        return next((table for table in self.tables if table.platform == platform), None)


def matrix_of(judged: Judged, tables: Sequence[Table] = (), evidence: Sequence[Evidence] = ()) -> Matrix:
    """The matrix of what is judged, with what others publish and with evidence."""
    others = with_evidence(judged.features, evidence)
    arguments = without_device_code(with_tables_and_evidence(judged.arguments, tables, evidence), judged.unbuilt)
    records = by_key((*arguments, *others))
    return Matrix(judged.manifests, records, judged.defaults, tuple(tables), tuple(evidence))


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
    return matrix_of(judged, tables, evidence)


def read_matrix(repository: Repository | None, platforms: Sequence[str] = ()) -> Matrix:
    """The matrix of a checkout: of the built-in platforms, or of the named `platforms` of any distribution."""
    installed = find_platforms()
    if unknown := sorted(set(platforms) - installed.keys()):
        raise MatrixError(f"there is no platform {', '.join(unknown)}; installed are {', '.join(installed)}")
    chosen = [platform for name, platform in installed.items() if name in platforms or not platforms]
    manifests = [platform.loaded for platform in chosen if platforms or platform.distribution == BUILT_IN]
    if repository is None:
        return make_matrix(manifests)
    evidence = read_folder(repository.evidence)
    judged = read_judged(repository, manifests, evidence)
    matrix = matrix_of(judged, read_tables(repository.published), evidence)
    names = [manifest.name for manifest in manifests]
    recipes = tuple(table for table in read_recipes(repository.published) if table.platform in names)
    verdicts = read_verdicts(repository.checkpoints)
    published = read_checkpoints(repository.checkpoints)
    checkpoints = tuple((checkpoint, verdicts[checkpoint.id]) for checkpoint in published if checkpoint.id in verdicts)
    architectures = read_table(repository.architectures)
    return replace(matrix, architectures=architectures, recipes=recipes, checkpoints=checkpoints)


def read_judged(repository: Repository, manifests: Sequence[Manifest], evidence: Sequence[Evidence] = ()) -> Judged:
    """As `judge` with the inventory of a checkout, but judged once for the same code, inventory and numbers.

    The manifests must be those of installed platforms, if of some variants only.
    """
    inventory = read_inventory(repository.inventory)
    numbers = [
        (manifest.name, variant, tested_numbers(evidence, manifest.name, variant))
        for manifest in manifests
        for variant in manifest.variants
    ]

    def judge_all() -> _Kept:
        judged = judge(manifests, evidence=evidence, inventory=inventory)
        defaults = {":".join(place): values for place, values in judged.defaults.items()}
        return _Kept(judged.arguments, judged.features, defaults)

    key = key_of(code_files("judged"), repr(numbers), to_json(inventory))
    saved = kept(repository.kept, "judged", key, _Kept, judge_all)
    defaults = {(place.partition(":")[0], place.partition(":")[2]): values for place, values in saved.defaults.items()}
    return Judged(tuple(manifests), saved.arguments, saved.features, inventory.unbuilt, defaults)


def read_plugin_matrix(platform: str, reports: Sequence[Path]) -> Matrix:
    """The matrix of one installed plugin, with the evidence of its conformance reports; needs no checkout."""
    installed = find_platforms()
    if platform not in installed:
        raise MatrixError(f"--plugin {platform}: there is no such platform; installed are {', '.join(installed)}")
    manifest = installed[platform].loaded
    results = read_reports(reports, platform)
    inventory = with_reported_ops(observe_in_child(platform), results)
    judged = judge([manifest], inventory=inventory)
    testable = [key for key, record in matrix_of(judged).records.items() if not record.values]
    evidence = on_known_cells((line for report in results for line in evidence_of(report)), testable)
    return replace(matrix_of(judged, evidence=evidence), runs=tuple(map(summary_of, results)))

"""An imagined platform and its matrix, for tests of the support matrix."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from srv.platform import API_VERSION
from srv.platform.facts import BackendSpec, DeviceFacts, PlatformFacts, Requires, ResolutionContext, Support
from srv.platform.manifest import Manifest
from srv_matrix.build import judge_arguments, tested_numbers
from srv_matrix.inventory import Inventory
from srv_matrix.judged import Judged, judge
from srv_matrix.matrix import Matrix, matrix_of
from srv_matrix.published import Reason, Row, Table
from srv_matrix.records import Evidence, Level
from srv_matrix.sample import sample_models

GIB = 2**30
VARIANTS = ("mk1", "mk2")
CAPABLE = frozenset({"paged_kv", "prefix_cache", "chunked_prefill", "overlap", "float32", "bfloat16"})


def git(folder: Path, *arguments: str) -> None:
    """Run git in a folder, with a user name for commits."""
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _unused(context: object) -> Any:
    raise AssertionError("the matrix is generated without a device")


def _pages_of_32(context: ResolutionContext) -> Requires:
    return Requires({"page_size": (32,)})


def _anything(context: ResolutionContext) -> Requires:
    return Requires()


def manifest(*support: Support, capabilities: frozenset[str] = CAPABLE) -> Manifest:
    """A platform "imagined" with two variants, whose attention backend requires pages of 32 tokens."""
    backends = {
        "attention": (BackendSpec("wide", 1, _pages_of_32, "imagined.attention:Wide", "page_token_head", graphs=True),),
        "sampling": (BackendSpec("dice", 1, _anything, "imagined.sampling:Dice"),),
    }
    profiles = {variant: DeviceFacts(variant, 64 * GIB, 1) for variant in VARIANTS}
    facts = PlatformFacts(lambda _: capabilities, profiles, backends=backends, support=support)
    return Manifest("imagined", API_VERSION, ">=0.1", VARIANTS, 1, "exists in tests only", facts, _unused, _unused)


def matrix(
    *support: Support,
    evidence: Sequence[Evidence] = (),
    tables: Sequence[Table] = (),
    inventory: Inventory | None = None,
    features: bool = True,
    methods: bool = False,
) -> Matrix:
    """The matrix of only that platform. What follows from rules alone takes seconds, and is kept for other evidence.

    `features`: with records of models, endpoints, ops and pairs of arguments. `methods`: as of `judge`.
    """
    numbers = {variant: tested_numbers(evidence, "imagined", variant) for variant in VARIANTS}
    key = repr((support, inventory, numbers, features, methods))
    if key not in _JUDGED:
        manifests = (manifest(*support),)
        if features:
            _JUDGED[key] = judge(manifests, evidence=evidence, inventory=inventory, methods=methods)
        else:
            arguments = judge_arguments(manifests, sample_models(), evidence)
            _JUDGED[key] = Judged(manifests, arguments, (), {}, {})
    return matrix_of(_JUDGED[key], tables, evidence)


_JUDGED: dict[str, Judged] = {}


def row(flag: str, mk1: bool, mk2: bool, options: str = "Type: str", section: str = "One") -> Row:
    return Row(section, flag, (), "None", options, {"mk1": mk1, "mk2": mk2})


def table(*rows: Row, reasons: tuple[Reason, ...] = ()) -> Table:
    return Table("vendor", "imagined", "What the vendor says", {"mk1": "mk1", "mk2": "mk2"}, rows, reasons)


def evidence(*covers: str, **changes: Any) -> Evidence:
    """A test that passed on mk1; the machine is of the same variant unless it is given."""
    defaults: Mapping[str, Any] = {
        "platform": "imagined",
        "variant": "mk1",
        "level": Level.E4,
        "test": "tests/test_it.py::test_it",
        "outcome": "passed",
        "commit": "c0ffee",
        "plugin_version": "imagined 1.0",
        "versions": {"torch": "2.13.0"},
        "device": "Imagined One",
        "date": "2026-01-02",
    }
    fields = {**defaults, **changes}
    return Evidence(covers=covers, **{"machine": fields["variant"], **fields})

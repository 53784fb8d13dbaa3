"""Evidence from conformance reports: which cells a check of the kit shows, for the pages of a plugin's own vendor.

A report is what `srv conformance run --report FILE` writes. Needs no checkout of srv, no device and no torch. This
module must not know how a page is made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from srv.testing.conformance.model import Outcome, Report, read_report
from srv_matrix.inventory import Inventory
from srv_matrix.records import Evidence, Key, Level, split_versions
from srv_matrix.repository import MatrixError

# What a check shows if it passes: it compares the output with a reference, or sees the feature's effect.
COVERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "engine.prefix_cache": ("disable_radix_cache=false",),
        "engine.no_prefix_cache": ("disable_radix_cache=true",),
        "engine.no_overlap": ("disable_overlap_schedule=true",),
        "engine.graphs": ("disable_graphs=false",),
        "engine.pieces": ("enable_piecewise_graphs=true",),
        "engine.ranks": ("tp_size=2",),
        "attention.int8_kv": ("kv_cache_dtype=int8",),
        "attention.fp8_kv": ("kv_cache_dtype=fp8_e4m3", "kv_cache_dtype=fp8_e5m2"),
        "engine.compiled": ("enable_torch_compile=true",),
        "engine.drafts": ("speculative_algorithm=NGRAM",),
        "engine.embeddings": ("is_embedding=true",),
        "engine.w8a8": ("quantization=modelslim",),
        "engine.float32": ("dtype=float32",),
        "engine.bfloat16": ("dtype=bfloat16",),
        "engine.float16": ("dtype=float16",),
        "server.serves": ("endpoint:POST /generate", "endpoint:GET /get_server_info"),
    }
)
_NAMED_DTYPES = re.compile(r"\bin (float32|bfloat16|float16)\b")  # in the message of a check
_RAN = ("passed", "failed")
_OPS = "op."  # how the names of checks of ops begin
_OTHER_OPS = "op.others"  # the check of several ops
_OP = re.compile(r"(\w+): (.*)")  # in its message, one after the other with semicolons
ALL_STEPS = "attention.mixed"  # the check of prompts and outputs in one step, by every backend
_SETUP = re.compile(r"(?:^|; )(\w+)(?: \((prefill|decode)\))?, (?=\w+, )")  # in its message
_ROLES = ("prefill_attention_backend", "decode_attention_backend")


def read_reports(paths: Iterable[Path], platform: str) -> tuple[Report, ...]:
    """The reports of one platform; MatrixError for a file that is none, of another platform, or without a device."""
    return tuple(_read(path, platform) for path in paths)


def _read(path: Path, platform: str) -> Report:
    remedy = f"Pass what `srv conformance run --device {platform} --report FILE` has written"
    try:
        report = read_report(path)
        name = report.device.get("platform")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise MatrixError(f"--evidence {path} is not a conformance report: {error}. {remedy}") from error
    if name != platform:
        raise MatrixError(f"--evidence {path} is a report of platform {name}, not of {platform}. {remedy}")
    if not report.device.get("available"):
        raise MatrixError(f"--evidence {path}: no device was available in that run, so it shows nothing. {remedy}")
    return report


def evidence_of(report: Report) -> Iterator[Evidence]:
    """One line per check that ran and shows a cell. A run on a simulated device has the level E3, another one E4."""
    device = report.device
    plugin = [f"{name} {version}" for name, version in report.versions.items() if name != "torch"]  # srv, then its own
    torch = {name: version for name, version in report.versions.items() if name == "torch"}
    simulated = bool(device.get("simulated"))
    versions, simulator = split_versions(torch | device.get("versions", {}), plugin[-1], simulated=simulated)
    shown = Evidence(
        covers=(),
        platform=device["platform"],
        variant=device["variant"],
        level=Level.E3 if simulated else Level.E4,
        test="",
        outcome="passed",
        commit="",
        plugin_version=", ".join(plugin),
        versions=versions,
        device=device.get("name", ""),
        date=report.date[:10],
        machine=device["variant"],
        simulator=simulator,
    )
    for outcome in report.outcomes:
        if outcome.status in _RAN and (cells := _cells(outcome)):
            yield replace(shown, covers=cells, test=f"srv conformance: {outcome.check}", outcome=outcome.status)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    dtypes = _dtypes(outcome.message)
    if outcome.check.startswith(_OPS):
        return tuple(f"op:{name}/{dtype}" for name, ran in _ops(outcome) for dtype in ran)
    if outcome.check == "engine.greedy":
        return tuple(f"dtype={dtype}" for dtype in dtypes)
    if outcome.check == ALL_STEPS:
        return tuple(
            dict.fromkeys(cell for match in _SETUP.finditer(outcome.message) for cell in _slots(*match.groups()))
        )
    return COVERS.get(outcome.check, ())


def _slots(backend: str, role: str | None) -> tuple[str, ...]:
    """The values of arguments that name an attention backend in this role; None: it computes all steps."""
    arguments = (f"{role}_attention_backend",) if role else ("attention_backend", *_ROLES)
    return tuple(f"{argument}={backend}" for argument in arguments)


def on_known_cells(evidence: Iterable[Evidence], cells: Iterable[Key]) -> tuple[Evidence, ...]:
    """The evidence without cells that the matrix does not have, such as an endpoint of a newer version."""
    known_cells = set(cells)
    on_known = (
        replace(line, covers=tuple(cell for cell in line.covers if (cell, line.platform, line.variant) in known_cells))
        for line in evidence
    )
    return tuple(line for line in on_known if line.covers)


def with_reported_ops(inventory: Inventory, reports: Sequence[Report]) -> Inventory:
    """The inventory with the ops that the reports' checks have run; without ops if nothing is known of any variant.

    A report says what its own variant implements, beside what the plugin declares, and nothing of the others.
    """
    implemented = {place: dict(ops) for place, ops in inventory.implemented.items()}
    for report in reports:
        of_ops = [outcome for outcome in report.outcomes if outcome.check.startswith(_OPS) and outcome.status in _RAN]
        if of_ops:
            ops = implemented.setdefault(f"{report.device['platform']}:{report.device['variant']}", {})
            for of_op in of_ops:
                for name, ran in _ops(of_op):
                    ops[name] = tuple(dict.fromkeys((*ops.get(name, ()), *ran)))
    return replace(inventory, ops=inventory.ops if implemented else (), implemented=implemented, unbuilt={})


def _ops(outcome: Outcome) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The ops that a check ran, with the dtypes."""
    if outcome.check != _OTHER_OPS:
        yield outcome.check.removeprefix(_OPS), _dtypes(outcome.message)
        return
    for part in outcome.message.split("; ") if outcome.status == "passed" else ():
        if match := _OP.fullmatch(part):
            yield match[1], _dtypes(match[2])


def _dtypes(message: str) -> tuple[str, ...]:
    """The dtypes that a check ran in."""
    return tuple(dict.fromkeys(_NAMED_DTYPES.findall(message)))


def summary_of(report: Report) -> str:
    """What ran where, how to repeat it, and what failed, as one line of Markdown."""
    counts = Counter(outcome.status for outcome in report.outcomes)
    counted = ", ".join(f"{count} {status}" for status, count in counts.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    where = f"{report.device['variant']}, {report.device.get('name') or 'unnamed'}"
    failed = "".join(f"; failed: {failure.check}: {failure.message}" for failure in report.failures)
    return f"`{report.command}` on {where} ({versions}; {report.date[:10]}): {counted}{failed}"

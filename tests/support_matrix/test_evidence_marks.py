"""Every implemented argument has a test that is evidence, and every mark names an existing cell.

Most marks in `tests` are for the CPU. Features that no CPU has are tested on simulated devices and GPUs, by
their plugins' own tests and some of `tests`: these marks are compared with their platform's matrix, with a level of at
most E3.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from every import every

from srv.args.config import ARGUMENTS
from srv.platform.probe import probe
from srv.platform.registry import find_platforms
from srv_cpu.ops import OPS
from srv_matrix.evidence import Marks, faults, from_line, read_marks, to_line
from srv_matrix.matrix import Matrix, matrix_of, read_judged
from srv_matrix.records import STARTS, Evidence, Level
from srv_matrix.repository import Repository
from srv_matrix.weight_methods import method_of

pytestmark = pytest.mark.slow  # collects all tests, and judges the committed matrix

ROOT = Path(__file__).resolve().parents[2]
GPUS = {"cuda": "sm90"}  # platform -> the GPU that is simulated
SIMULATED = {**GPUS, "npu": "a2"}
# Their effect is tested on simulated GPUs in a child process that records no evidence, so pages say "declared".
UNRECORDED = {"triton_attention_num_kv_splits", "triton_attention_split_tile_size"}


def _marks(folder: str) -> Marks:
    """All marks of a folder of this checkout, as pytest collects them."""
    return {test: mark for test, mark in read_marks(Repository(ROOT)).items() if test.startswith(f"{folder}/")}


def _on(platform: str, marks: Marks) -> Marks:
    """The marks of tests that run on a platform."""
    return {test: mark for test, mark in marks.items() if mark["platform"] in ("", platform)}


def _shown(marks: Marks, platform: str, max_level: Level, variant: str = "") -> Matrix:
    """The platform's matrix as if every marked test had passed on this variant, by default that of this machine."""
    installed = find_platforms()[platform]
    if not variant:
        device = probe(installed).device
        assert device is not None
        variant = device.variant
    passed = [
        Evidence(tuple(mark["covers"]), platform, mark["variant"] or variant,
                 min(Level[mark["level"]], max_level), test, "passed",
                 "c", "p", {}, "d", "2026-01-01", variant, mark["note"])
        for test, mark in marks.items()
    ]  # fmt: skip
    assert [from_line(to_line(line)) for line in passed] == passed
    manifest = replace(
        installed.loaded, variants=tuple(dict.fromkeys(line.variant for line in passed))
    )  # not the others
    return matrix_of(read_judged(Repository(ROOT), [manifest], passed), evidence=passed)


@pytest.fixture(scope="module")
def all_marks() -> Marks:
    """The marks of `tests`."""
    return _marks("tests")


@pytest.fixture(scope="module")
def marks(all_marks: Marks) -> Marks:
    return _on("cpu", all_marks)


@pytest.fixture(scope="module")
def simulated_marks(all_marks: Marks) -> dict[str, Marks]:
    """The marks of tests on simulated devices, by platform."""
    elsewhere = {test: mark for test, mark in all_marks.items() if mark["platform"]}
    gpu = _marks("platforms/gpu/tests")
    return {
        "toy": {**_marks("plugins/toy_device/tests"), **_on("toy", elsewhere)},
        "npu": {**_marks("platforms/npu/tests"), **_on("npu", elsewhere)},
        **{name: {**_on(name, gpu), **_on(name, elsewhere)} for name in GPUS},
    }


@pytest.fixture(scope="module")
def shown(marks: Marks) -> Matrix:
    return _shown(marks, "cpu", Level.E5)


@pytest.fixture(scope="module")
def shown_simulated(simulated_marks: dict[str, Marks]) -> dict[str, Matrix]:
    return {
        name: _shown(marks_of, name, Level.E3, SIMULATED.get(name, "")) for name, marks_of in simulated_marks.items()
    }


def _covered(marks: Marks) -> set[str]:
    """The arguments that marked tests cover."""
    return {cell.partition("=")[0] for mark in marks.values() for cell in mark["covers"]} & ARGUMENTS.keys()


def _works(name: str, shown: Matrix, platform: str) -> bool:
    """Whether the platform supports an argument."""
    cell = shown.cell(name, platform, shown.evidence[0].variant)
    return cell is not None and cell.status.works


# Tests show the effect of some values of these, but not of all that the page lists.
PARTLY = {
    "dynamic_batch_tokenizer_batch_size",
    "dynamic_batch_tokenizer_batch_timeout",
    "reasoning_parser",
    "stream_interval",
    "tool_call_parser",
}
# Values that a server only starts with, and why no test sees what they change.
ONLY_STARTED = {
    "connection_timeout_seconds=120.0": "a client would have to wait for two minutes",
    "engine_start_timeout_seconds=1800.0": "an engine would have to take half an hour",
    "soft_watchdog_timeout=600.0": "an engine would have to hang for ten minutes",
    "watchdog_timeout=600.0": "as soft_watchdog_timeout",
    "max_connections=2000": "a client would need 2,001 sockets",
    "max_held_request_bytes=536870912": "clients would have to send half a gigabyte",
}


def test_hardly_a_value_rests_on_starts_alone(marks: Marks) -> None:
    """A start verifies nothing that its client does not see. The matrix shows these values with the word "starts"."""
    started = {cell for mark in marks.values() if mark["note"] == STARTS for cell in mark["covers"]}
    verified = {cell for mark in marks.values() if mark["note"] != STARTS for cell in mark["covers"]}
    assert started - verified == ONLY_STARTED.keys()


def test_every_implemented_argument_has_evidence(
    marks: Marks, simulated_marks: dict[str, Marks], shown: Matrix, shown_simulated: dict[str, Matrix]
) -> None:
    """On the CPU, or on a simulated device that supports it if the CPU does not."""
    implemented = {name for name, argument in ARGUMENTS.items() if argument.status == "implemented"}
    missing = implemented - _covered(marks)
    assert {name for name in missing if _works(name, shown, "cpu")} == set()
    simulated = {
        name
        for platform, marks_of in simulated_marks.items()
        for name in _covered(marks_of)
        if _works(name, shown_simulated[platform], platform)
    }
    assert missing - simulated == UNRECORDED
    assert {name for name in UNRECORDED if not _works(name, shown_simulated["cuda"], "cuda")} == set()


def test_no_planned_argument_has_evidence(marks: Marks, simulated_marks: dict[str, Marks]) -> None:
    covered = set().union(*map(_covered, (marks, *simulated_marks.values())))
    assert {name for name in covered if ARGUMENTS[name].arg.planned} == set()


def test_every_mark_is_compared_with_a_matrix(all_marks: Marks, simulated_marks: dict[str, Marks]) -> None:
    assert {mark["platform"] for mark in all_marks.values()} <= {"", "cpu", *simulated_marks}
    assert {mark["platform"] for mark in _marks("plugins/toy_device/tests").values()} <= {"", "toy"}


@every("platform", ["cpu", "toy", *SIMULATED])
def test_every_mark_names_a_cell_that_works(
    platform: str,
    marks: Marks,
    simulated_marks: dict[str, Marks],
    shown: Matrix,
    shown_simulated: dict[str, Matrix],
) -> None:
    matrix, marked = {"cpu": shown, **shown_simulated}[platform], {"cpu": marks, **simulated_marks}[platform]
    assert marked
    for test, mark in marked.items():
        for name in mark["covers"]:
            cell = matrix.cell(name, platform, mark["variant"] or matrix.evidence[0].machine)
            assert cell is not None, f"{test} covers {name}, which is not a cell"
            assert cell.status.works, f"{test} covers {name}, which is {cell.status.value}"
            assert not cell.values, f"{test} covers {name}: name one of its values"


def test_simulated_cells_are_never_verified(shown_simulated: dict[str, Matrix]) -> None:
    for platform, matrix in shown_simulated.items():
        cells = [matrix.cell(name, platform, line.variant) for line in matrix.evidence for name in line.covers]
        assert cells
        assert [cell.feature for cell in cells if cell is not None and cell.verified] == []


def test_cells_that_all_marks_verify(shown: Matrix) -> None:
    """If all tests pass, all endpoints, ops and models are verified, and supported arguments with few exceptions.

    The classifier of EuroBERT is refused with its default, "late" pooling.
    """
    device = shown.evidence[0].machine
    unverified = [
        name
        for name, argument in ARGUMENTS.items()
        if argument.status == "implemented" and _works(name, shown, "cpu") and not _verified(shown, name, device)
    ]
    started = {cell.partition("=")[0] for cell in ONLY_STARTED}
    assert set(unverified) == started | PARTLY | {"mem_fraction_static"}  # its smallest value is below what starts
    assert {shown.cell(name, "cpu", device).word for name in started} == {STARTS}
    cells = [name for kind in ("endpoint", "op", "model") for name in shown.of_kind(kind) if method_of(name) is None]
    refused = "model:EuroBertForSequenceClassification/safetensors"
    assert [name for name in cells if not _verified(shown, name, device)] == [refused]
    assert not _works(refused, shown, "cpu")


def test_each_decoder_is_verified_in_a_method_of_each_kind_of_layers(shown: Matrix) -> None:
    """And no cell that a launch refuses has a test."""
    device = shown.evidence[0].machine
    cells = [name for name in shown.of_kind("model") if method_of(name) is not None]
    verified = {name for name in cells if _verified(shown, name, device)}
    for method in ("awq", "w8a8_int8", "fp8", "bitsandbytes"):
        of_method = [name for name in cells if method_of(name) == method and _works(name, shown, "cpu")]
        assert len(verified.intersection(of_method)) >= 44, method
    ran = [name for name in cells if (cell := shown.cell(name, "cpu", device)) is not None and cell.evidence]
    assert verified == set(ran)


def test_evidence_of_the_marks_has_no_faults(marks: Marks, shown: Matrix) -> None:
    cells = [key for key, record in shown.records.items() if not record.values]
    assert faults(shown.evidence, cells, marks, lambda _: True) == []


def test_forced_paths_have_a_note(marks: Marks, shown: Matrix) -> None:
    forced = {test: mark for test, mark in marks.items() if mark["variant"]}
    assert {mark["note"] for mark in forced.values()} == {"forced path"}
    assert {mark["variant"] for mark in forced.values()} == {"avx2"}
    cells = {cell for mark in forced.values() for cell in mark["covers"]}
    native = {impl.op for impl in OPS if impl.name == "native"}
    assert cells == {f"op:{op}/{dtype}" for op in native for dtype in ("float32", "bfloat16")}
    assert [cell for cell in cells if not _verified(shown, cell, "avx2")] == []


def _verified(shown: Matrix, name: str, variant: str) -> bool:
    cell = shown.cell(name, "cpu", variant)
    return cell is not None and cell.verified

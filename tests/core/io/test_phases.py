"""The start-up ledger: what is recorded of a phase, and the causes of slow ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from srv.io.phases import Phase, Phases, ProcessUse, read_seconds, since_process_start, why_slow

MIB = 2**20


def cause(seconds: float, processor: float, stored: int = 0, swapped: int = 0) -> str:
    return why_slow(
        seconds, ProcessUse(1.0, 5 * MIB, MIB), ProcessUse(1.0 + processor, 5 * MIB + stored, MIB + swapped), "packing"
    )


def test_the_cause_is_what_the_operating_system_counted() -> None:
    assert cause(4.0, 0.5, stored=400 * MIB) == "the page cache was cold: 400 MiB came from storage, 100 MiB/s"
    assert cause(4.0, 3.5) == "packing: 3.5 s of processor time"
    assert cause(4.0, 3.5, stored=400 * MIB) == "packing: 3.5 s of processor time", "it did not wait for storage"
    assert cause(4.0, 0.5, swapped=30 * MIB) == "30 MiB of this process were moved to swap"
    assert cause(4.0, 0.5, stored=MIB).startswith("it waited 3.5 s for the device, for a lock, or for processors")


def test_without_figures_of_the_system_only_the_processor_is_a_cause() -> None:
    assert why_slow(4.0, ProcessUse(1.0), ProcessUse(4.0), "compiling") == "compiling: 3.0 s of processor time"


def test_a_phase_that_raises_is_recorded_and_its_error_passes() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="no weights"), phases.run("weights", (0.5, "10 MiB at 20 MiB/s")):
        raise ValueError("no weights")
    (phase,) = phases.done
    assert (phase.name, phase.predicted, phase.basis) == ("weights", 0.5, "10 MiB at 20 MiB/s")


def test_only_a_slow_phase_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: more than a second, and twice the prediction if there is one."""
    for predicted, ended, slow in ((None, 0.9, False), (None, 1.1, True), (3.0, 5.0, False), (3.0, 7.0, True)):
        clock: Iterator[float] = iter((0.0, ended))
        monkeypatch.setattr("srv.io.phases.time", SimpleNamespace(monotonic=lambda clock=clock: next(clock)))
        phases = Phases(lambda: ProcessUse(0.0))
        with phases.run("x", None if predicted is None else (predicted, "basis")):
            pass
        assert bool(phases.done[0].cause) == slow, (predicted, ended)


def test_reading_is_predicted_from_a_sample_of_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "large").write_bytes(bytes(2 * MIB))
    prediction = read_seconds([tmp_path / "small", tmp_path / "large"], 64 * MIB)
    assert prediction is not None
    seconds, basis = prediction
    assert seconds > 0
    assert basis.startswith("64 MiB at ")
    assert "as a sample of large was read" in basis


def test_nothing_is_predicted_without_a_sample(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_bytes(b"x")
    assert read_seconds([tmp_path / "tiny"], MIB) is None
    assert read_seconds([tmp_path / "missing"], MIB) is None
    assert read_seconds([], MIB) is None


def test_usage_and_age_of_this_process_are_known_on_linux() -> None:
    usage = ProcessUse.now()
    assert usage.processor > 0
    if Path("/proc/self/io").exists():
        assert usage.stored is not None
        age = since_process_start()
        assert age is not None
        assert 0 < age < 24 * 3600


def test_a_phase_is_shown_with_its_prediction_and_cause() -> None:
    phase = Phase("weights", 2.5, 1.0, "10 MiB at 10 MiB/s", "the disk was slow")
    assert str(phase) == "weights: 2.50 s, 1.00 s predicted (10 MiB at 10 MiB/s); slow: the disk was slow"
    assert str(Phase("http", 0.123)) == "http: 0.12 s"
    assert phase.to_dict()["cause"] == "the disk was slow"

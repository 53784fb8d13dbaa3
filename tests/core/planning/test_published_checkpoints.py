"""Published checkpoints: srv counts their parameters, and a plan and a launch have the verdict that is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_steps import launch_codes

from srv.errors import ModelError
from srv.models.read import read_facts
from srv.planning.target import find_target
from srv_matrix.checkpoints import (
    MACHINES,
    REMEDY,
    Checkpoint,
    Verdict,
    Verdicts,
    plan_on,
    read_checkpoints,
    read_verdicts,
    user_input,
)

FOLDER = Path(__file__).resolve().parents[3] / "support_matrix" / "published" / "checkpoints"
TOLERANCE = 0.005
LEAST = 0.75  # of published parameters, if they count what srv does not load
ASKED = "unsupported_architecture"  # by a process that asks transformers, for seconds
FIRST = "npu:a2"  # the others have the same core


def tier(place: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if place == FIRST else pytest.mark.proof(minutes=0.7)


@pytest.fixture(scope="module")
def checkpoints() -> tuple[Checkpoint, ...]:
    return read_checkpoints(FOLDER)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdicts]:
    return dict(read_verdicts(FOLDER))


def test_there_is_a_verdict_of_each_checkpoint(
    checkpoints: tuple[Checkpoint, ...], verdicts: dict[str, Verdicts]
) -> None:
    names = [checkpoint.id for checkpoint in checkpoints]
    assert len(names) == len(set(names)) >= 60
    assert names == list(verdicts), REMEDY
    assert all(list(verdict.places) == list(MACHINES) for verdict in verdicts.values()), REMEDY


def test_srv_counts_the_published_parameters(
    checkpoints: tuple[Checkpoint, ...], verdicts: dict[str, Verdicts], tmp_path: Path
) -> None:
    """To half a percent, or less than published by what the row says that srv does not load."""
    wrong = []
    for checkpoint in checkpoints:
        counted = counted_parameters(checkpoint, tmp_path)
        if counted != verdicts[checkpoint.id].parameters:
            wrong.append(f"{checkpoint.id}: {counted} parameters, not {verdicts[checkpoint.id].parameters}: {REMEDY}")
        elif counted is None:
            wrong += [] if checkpoint.wanted else [f"{checkpoint.id}: no size is claimed, and none is wanted"]
        else:
            share = counted / checkpoint.parameters
            fits = LEAST < share < 1 if checkpoint.more else abs(share - 1) < TOLERANCE
            wrong += [] if fits else [f"{checkpoint.id}: {counted} parameters, {share:.2%} of the published ones"]
    assert wrong == []


def counted_parameters(checkpoint: Checkpoint, folder: Path) -> int | None:
    """None also of one whose configuration is refused."""
    user_input(checkpoint, folder, "cpu:avx512", 1)
    try:
        return read_facts(folder).parameters
    except ModelError:
        return None


@pytest.mark.parametrize("place", [pytest.param(place, marks=tier(place)) for place in MACHINES])
def test_plan_and_launch_have_the_recorded_verdict(
    place: str, checkpoints: tuple[Checkpoint, ...], verdicts: dict[str, Verdicts], tmp_path: Path
) -> None:
    wrong = []
    for checkpoint in checkpoints:
        recorded = verdicts[checkpoint.id].places[place]
        if is_asked(recorded) and place != next(iter(MACHINES)):
            continue
        planned = plan_on(checkpoint, tmp_path, place, recorded.ranks)
        if planned != recorded:
            wrong.append(f"{checkpoint.id}: a plan says {planned}, not {recorded}: {REMEDY}")
        launched = launch_codes(user_input(checkpoint, tmp_path, place, recorded.ranks), find_target(MACHINES[place]))
        # Whether memory suffices is measured by a launch once weights are loaded, and estimated by a plan.
        expected = set(planned.codes) - {"pool_too_small"}
        if not launched <= expected or bool(launched) != bool(expected):
            wrong.append(f"{checkpoint.id}: plan {sorted(expected)}, launch {sorted(launched)}")
    assert wrong == []


def is_asked(verdict: Verdict) -> bool:
    """Whether transformers is asked what its classes compute, which is the same for every place."""
    return ASKED in verdict.codes or verdict.layers == "transformers"

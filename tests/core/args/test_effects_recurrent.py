"""The effects of the arguments for recurrent states, with the engine of a model that has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_small import FIELDS, Small, engine, message
from models_small import small_model

from srv.testing.engine import CheckedEngine
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

PROMPT = [(place * 37 + 11) % 90 + 3 for place in range(30)]
RUNNING = 2


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder: Path = tmp_path_factory.mktemp("recurrent")
    model = small_model("qwen3_next", **FIELDS["qwen3_next"])
    model.save_pretrained(folder)
    return Small(folder, model, [], [])


def state_bytes(made: CheckedEngine) -> int:
    (line,) = [each for each in made.ready.memory[0] if each.name == "recurrent states"]
    assert line.measured is not None
    return line.measured


def cached_of_second(made: CheckedEngine) -> int:
    """How much of a prompt that was served before is cached."""
    results = [made.generate([message(name, PROMPT, 2)])[0] for name in ("first", "second")]
    return results[1].cached_tokens


@covers("max_mamba_cache_size=1", "max_mamba_cache_size=3", platform="cpu")
def test_max_mamba_cache_size(recurrent: Small) -> None:
    found = {}
    for size in (1, 3):
        with engine(recurrent, max_running_requests=1, max_mamba_cache_size=size) as made:
            found[size] = state_bytes(made), cached_of_second(made)
    assert found[3][0] == 2 * found[1][0]
    assert (found[1][1], found[3][1]) == (0, 28)


@covers("mamba_ssm_dtype=float32", "mamba_ssm_dtype=bfloat16", platform="cpu")
def test_mamba_ssm_dtype(recurrent: Small) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        flags = {"max_running_requests": RUNNING, "disable_radix_cache": True, "mamba_ssm_dtype": dtype}
        with engine(recurrent, **flags) as made:
            found[dtype] = state_bytes(made)
    state = 4 * 8 * 6  # elements of the state of one layer and request
    assert found["float32"] - found["bfloat16"] == (RUNNING + 1) * 3 * state * 2


@covers(*(f"mamba_full_memory_ratio={ratio}" for ratio in (1e-9, 0.01, 0.2, 0.4)), platform="cpu")
def test_mamba_full_memory_ratio(recurrent: Small) -> None:
    found = {}
    for ratio in (1e-9, 0.01, 0.2, 0.4):
        with engine(recurrent, max_running_requests=RUNNING, mamba_full_memory_ratio=ratio) as made:
            found[ratio] = cached_of_second(made)
    assert found == {1e-9: 0, 0.01: 28, 0.2: 28, 0.4: 28}


@covers(*(f"mamba_track_interval={interval}" for interval in (1, 8, 256, 512)), platform="cpu")
def test_mamba_track_interval(recurrent: Small) -> None:
    """A second turn goes on from the states that the first one saved in its output."""
    found = {}
    for interval in (1, 8, 256, 512):
        with engine(recurrent, max_running_requests=RUNNING, mamba_track_interval=interval) as made:
            (first,) = made.generate([message("first", PROMPT, 20)])
            (second,) = made.generate([message("second", [*PROMPT, *first.tokens, 5, 6], 2)])
            found[interval] = second.cached_tokens
    assert found == {1: 48, 8: 48, 256: 28, 512: 28}

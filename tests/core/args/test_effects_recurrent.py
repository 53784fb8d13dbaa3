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


def state_bytes(served: CheckedEngine) -> int:
    (line,) = [entry for entry in served.ready.memory[0] if entry.name == "recurrent states"]
    assert line.measured is not None
    return line.measured


def cached_of_second(served: CheckedEngine) -> int:
    """How much of a prompt that was served before is cached."""
    results = [served.generate([message(name, PROMPT, 2)])[0] for name in ("first", "second")]
    return results[1].cached_tokens


@covers("max_mamba_cache_size=1", "max_mamba_cache_size=3", platform="cpu")
def test_max_mamba_cache_size(recurrent: Small) -> None:
    sizes = {}
    for size in (1, 3):
        with engine(recurrent, max_running_requests=1, max_mamba_cache_size=size) as served:
            sizes[size] = state_bytes(served), cached_of_second(served)
    assert sizes[3][0] == 2 * sizes[1][0]
    assert (sizes[1][1], sizes[3][1]) == (0, 28)


@covers("mamba_ssm_dtype=float32", "mamba_ssm_dtype=bfloat16", platform="cpu")
def test_mamba_ssm_dtype(recurrent: Small) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        flags = {"max_running_requests": RUNNING, "disable_radix_cache": True, "mamba_ssm_dtype": dtype}
        with engine(recurrent, **flags) as served:
            sizes[dtype] = state_bytes(served)
    state = 4 * 8 * 6  # elements of the state of one layer and request
    assert sizes["float32"] - sizes["bfloat16"] == (RUNNING + 1) * 3 * state * 2


@covers(*(f"mamba_full_memory_ratio={ratio}" for ratio in (1e-9, 0.01, 0.2, 0.4)), platform="cpu")
def test_mamba_full_memory_ratio(recurrent: Small) -> None:
    cached = {}
    for ratio in (1e-9, 0.01, 0.2, 0.4):
        with engine(recurrent, max_running_requests=RUNNING, mamba_full_memory_ratio=ratio) as served:
            cached[ratio] = cached_of_second(served)
    assert cached == {1e-9: 0, 0.01: 28, 0.2: 28, 0.4: 28}


@covers(*(f"mamba_track_interval={interval}" for interval in (1, 8, 256, 512)), platform="cpu")
def test_mamba_track_interval(recurrent: Small) -> None:
    """A second turn goes on from the states that the first one saved in its output."""
    cached = {}
    for interval in (1, 8, 256, 512):
        with engine(recurrent, max_running_requests=RUNNING, mamba_track_interval=interval) as served:
            (first,) = served.generate([message("first", PROMPT, 20)])
            (second,) = served.generate([message("second", [*PROMPT, *first.tokens, 5, 6], 2)])
            cached[interval] = second.cached_tokens
    assert cached == {1: 48, 8: 48, 256: 28, 512: 28}

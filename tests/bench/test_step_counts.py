"""A step of the CPU engine reads, allocates and calls as much as this table says, on any machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_counts import PREFILL, WEIGHTS, CountedEngine, Counts, counted_engine, explain_change

from srv_kernels.cpu.library import _SIGNATURES, load

Engines = Callable[[str], CountedEngine]

# The output of `python tests/bench/step_counts.py`. Python calls do not include comprehensions, so they are the same
# since 3.11; torch's calls are those of the release in constraints.txt.
#   weight_bytes, kv_bytes, allocations, native_calls, torch_calls, python_calls
EXPECTED = {
    ("small", "decode of 1 row"): Counts(321_792, 86_016, 2, 31, 11, 85),
    ("small", "decode of 4 rows"): Counts(321_792, 344_064, 2, 31, 11, 88),
    ("small", "decode of 16 rows"): Counts(321_792, 1_376_256, 2, 31, 11, 101),
    ("small", "decode of 16 rows over a prefix of 320"): Counts(321_792, 1_622_016, 2, 31, 11, 101),
    ("small", "decode of 16 rows, drawn from a nucleus"): Counts(321_792, 1_376_256, 5, 31, 16, 106),
    ("small", "prefill of 512"): Counts(321_792, 6_488_064, 43, 31, 68, 403),
    ("demo", "decode of 1 row"): Counts(96_506_496, 2_580_480, 2, 274, 11, 85),
    ("demo", "decode of 4 rows"): Counts(96_506_496, 10_321_920, 2, 274, 11, 88),
    ("demo", "decode of 16 rows"): Counts(96_506_496, 41_287_680, 2, 274, 11, 101),
    ("demo", "decode of 16 rows over a prefix of 320"): Counts(96_506_496, 56_033_280, 2, 274, 11, 101),
    ("demo", "decode of 16 rows, drawn from a nucleus"): Counts(96_506_496, 41_287_680, 5, 274, 16, 106),
    ("demo", "prefill of 512"): Counts(96_506_496, 389_283_840, 367, 274, 473, 1_537),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """One engine per model, created at its first use."""
    if load().library is None:
        pytest.skip(f"native kernels are counted, but are not available: {load().reason}")
    engines_made: dict[str, CountedEngine] = {}
    with ExitStack() as stack:

        def get(model: str) -> CountedEngine:
            if model not in engines_made:
                engines_made[model] = stack.enter_context(counted_engine(model))
            return engines_made[model]

        yield get


@pytest.mark.parametrize(
    ("model", "shape"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] == "demo" else ()) for case in EXPECTED],
)
def test_a_step_costs_what_the_table_says(engines: Engines, model: str, shape: str) -> None:
    actual, expected = engines(model).counts(shape), EXPECTED[model, shape]
    assert actual == expected, explain_change(model, shape, expected, actual)


def test_weights_of_every_product_are_counted() -> None:
    products = {name for name in _SIGNATURES if name.endswith("linear")}
    assert products == {name for name, weights in WEIGHTS.items() if weights and name.endswith("linear")}


def test_a_changed_count_is_reported_with_a_remedy() -> None:
    was = EXPECTED["small", PREFILL]
    text = explain_change("small", PREFILL, was, replace(was, native_calls=30, torch_calls=70))
    assert text.startswith("prefill of 512, small model: native_calls went from 31 to 30, torch_calls from 68 to 70.")
    assert "python tests/bench/step_counts.py" in text


def test_a_step_is_counted_the_same_again(engines: Engines) -> None:
    """The counts do not depend on what was counted before."""
    shape = "decode of 4 rows"
    first, _, again = (engines("small").counts(counted) for counted in (shape, PREFILL, shape))
    assert asdict(first) == asdict(again)

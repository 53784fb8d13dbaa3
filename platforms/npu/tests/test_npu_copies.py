"""Steps on a simulated card that runs operators only when the host waits: the same tokens, and no copy from or to
ordinary host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_npu_engine import engine, generate, random_model

from srv_npu.platform import NpuPlatform

PROMPTS = [[7], list(range(40, 57)), list(range(60, 189))]  # one token, a part of a page, and one more than a page


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("random"))


@pytest.fixture
def asynchronous(platform: NpuPlatform) -> Iterator[None]:
    deferral = platform._sdk().npu.deferral
    deferral.enabled = True
    yield
    platform._sdk().npu.synchronize()
    deferral.enabled = False


def tokens(path: Path, *flags: str) -> list[list[int]]:
    with engine(path, "npu", "bfloat16", *flags) as served:
        return [result.tokens for result in generate(served, PROMPTS, temperature=0.7, seed=5, logprobs=1)]


@pytest.mark.parametrize(
    "flags",
    [(), ("--disable-graphs", "--chunked-prefill-size", "48"), ("--speculative-algorithm", "NGRAM")],
    ids=["graphs", "eager", "drafts"],
)
def test_steps_use_no_ordinary_memory_and_are_in_order(
    path: Path, platform: NpuPlatform, flags: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    expected = tokens(path, *flags)
    request.getfixturevalue("asynchronous")
    card = platform._sdk().npu
    with engine(path, "npu", "bfloat16", *flags) as served:
        before = card.pageable_copies
        results = [result.tokens for result in generate(served, PROMPTS, temperature=0.7, seed=5, logprobs=1)]
        assert card.pageable_copies == before
    assert results == expected

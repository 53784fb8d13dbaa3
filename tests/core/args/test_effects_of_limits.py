"""The ordinary values of limits have an effect, too: with as many requests or tokens as they allow, and one more.

Like `test_effects.py`, with a model of one layer and a long context, and values that defaults and the support matrix
name. Drafts and graphs are tested there.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_small import Small, engine, make_small, message, messages

from srv.io.messages import Abort
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # `test_effects.py` shows the same behaviour with small values

POOL = 40_000
EAGER = {"disable_graphs": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("long"), num_hidden_layers=1, max_position_embeddings=8192)


def distinct(count: int, length: int = 2) -> list[list[int]]:
    """Prompts that differ in their first two tokens."""
    return [[3 + number % 90, 3 + number // 90, *[7] * (length - 2)] for number in range(count)]


def steps(small: Small, prompts: Sequence[list[int]], **flags: object) -> int:
    """Number of steps until each prompt has one token."""
    with engine(small, pool=POOL, overlap=False, **EAGER, **flags) as served:
        results = served.generate(messages(prompts, 1))
        assert [len(result.tokens) for result in results] == [1] * len(prompts)
        return served.stats().steps


@covers(*(f"chunked_prefill_size={size}" for size in (1, 256, 2048, 4096)), platform="cpu")
def test_chunked_prefill_size(small: Small) -> None:
    (prompt,) = distinct(1, 4097)
    assert [steps(small, [prompt], chunk=size) for size in (256, 2048, 4096)] == [17, 3, 2]
    assert steps(small, [prompt[:9]], chunk=1) == 9


@covers(*(f"max_prefill_tokens={limit}" for limit in (1, 16384, 32768)), platform="cpu")
def test_max_prefill_tokens(small: Small) -> None:
    """131 prompts of 250 tokens are one step for the larger limit; at the smallest one, each prompt is a step."""
    prompts = distinct(131, 250)
    flags = {"chunk": -1, "max_running_requests": len(prompts)}
    actual = [steps(small, prompts, max_prefill_tokens=limit, **flags) for limit in (16384, 32768)]
    assert actual == [3, 1]
    assert steps(small, prompts[:3], chunk=-1, max_prefill_tokens=1) == 3


@covers("max_running_requests=256", "max_running_requests=512", platform="cpu")
def test_max_running_requests(small: Small) -> None:
    for limit in (256, 512):
        with engine(small, pool=POOL, chunk=4096, max_running_requests=limit, **EAGER) as served:
            requests = messages(distinct(limit + 1), 2)
            for request in requests:
                served.send(request)
            served.step()
            actual = served.stats()
            served.run([request.id for request in requests])
        assert (actual.running, actual.waiting) == (limit, 1)


@covers("max_queued_requests=4096", "max_queued_requests=8192", platform="cpu")
def test_max_queued_requests(small: Small) -> None:
    """One request runs and as many wait as may; of two more, both are refused."""
    for limit in (4096, 8192):
        with engine(small, max_running_requests=1, max_queued_requests=limit, **EAGER) as served:
            running = message("running", [3, 4], 200)
            served.send(running)
            served.step()
            requests = messages(distinct(limit + 2), 2)
            for request in requests:
                served.send(request)
            served.step()
            refused = [request.id for request in requests if (error := served.results[request.id].error)]
            codes = {error[0] for request in requests if (error := served.results[request.id].error)}
            served.send(Abort(None))
            served.run([request.id for request in (running, *requests)])
        assert refused == [request.id for request in requests[limit:]]
        assert codes == {"queue_full"}

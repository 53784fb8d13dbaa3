"""The pooler alone: chunks, slots that are reused, and rows of several kinds in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from host_transfers import HOST_TRANSFERS

from srv.sample.pooling import Pooler, VectorRow
from srv.sched.plan import Start
from srv.types import PooledOutput, Pooling, PoolingParams, RequestSpec, SamplingParams

HIDDEN = torch.randn(12, 6, generator=torch.Generator().manual_seed(1)).bfloat16()


def started(pooler: Pooler, slot: int, tokens: int, **params: Any) -> None:
    sampling = PoolingParams(normalize=False, **params) if params else SamplingParams(max_tokens=3, hidden_states=True)
    pooler.start(Start(slot, RequestSpec(id=str(slot), tokens=tuple(range(tokens)), params=sampling)))


def values(data: bytes | None) -> torch.Tensor:
    assert data is not None
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").copy())


def test_a_mean_over_chunks_is_summed_in_float32() -> None:
    pooler = Pooler(HOST_TRANSFERS)
    started(pooler, 2, 12, pooling=Pooling.MEAN)
    results = [
        pooler.pool(HIDDEN[a:b], [VectorRow(2, 0, b - a, computed=b)]).to_host() for a, b in ((0, 5), (5, 6), (6, 12))
    ]
    assert results[:2] == [[None], [None]]
    torch.testing.assert_close(values(results[2][0]), HIDDEN.float().mean(0), atol=1e-6, rtol=1e-6)


def test_rows_of_one_step_are_pooled_by_their_own_parameters() -> None:
    pooler = Pooler(HOST_TRANSFERS)
    started(pooler, 0, 4, pooling=Pooling.MEAN)
    started(pooler, 1, 5, pooling=Pooling.LAST, dimensions=2)
    started(pooler, 3, 9)
    rows = [VectorRow(0, 0, 4, computed=4), VectorRow(1, 8, 9, computed=5), VectorRow(3, 9, 12, computed=3)]
    mean, last, returned = pooler.pool(HIDDEN, rows).to_host()
    torch.testing.assert_close(values(mean), HIDDEN[:4].float().mean(0))
    assert torch.equal(values(last), HIDDEN[8, :2].float())
    assert torch.equal(values(returned).reshape(3, 6), HIDDEN[9:].float())


def test_prompts_that_end_in_one_step_are_finished_together() -> None:
    """The output matrix is read once per step, not once per prompt."""
    batches: list[torch.Tensor] = []

    def labels(pooled: torch.Tensor, params: Sequence[PoolingParams]) -> Sequence[torch.Tensor]:
        batches.append(pooled)
        return [row[: param.types_from] for row, param in zip(pooled, params, strict=True)]

    pooler = Pooler(HOST_TRANSFERS, {PooledOutput.LABELS: labels})
    started(pooler, 0, 4, pooling=Pooling.MEAN, output=PooledOutput.LABELS, types_from=1)
    started(pooler, 1, 9, pooling=Pooling.LAST, output=PooledOutput.LABELS)
    started(pooler, 2, 1, pooling=Pooling.CLS)
    started(pooler, 3, 5, pooling=Pooling.LAST, output=PooledOutput.LABELS, types_from=3)
    rows = [VectorRow(0, 0, 4, 4), VectorRow(1, 4, 6, computed=6), VectorRow(2, 6, 7, 1), VectorRow(3, 7, 12, 5)]
    mean, incomplete, first, last = pooler.pool(HIDDEN, rows).to_host()
    assert incomplete is None
    assert torch.equal(values(first), HIDDEN[6].float())
    (together,) = batches
    torch.testing.assert_close(together, torch.stack([HIDDEN[:4].float().mean(0), HIDDEN[11].float()]))
    assert torch.equal(values(mean), together[0, :1])
    assert torch.equal(values(last), together[1, :3])


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "its step failed"])
def test_a_slot_that_starts_again_has_no_sum_of_its_last_request(ended: bool) -> None:
    pooler = Pooler(HOST_TRANSFERS)
    started(pooler, 0, 8, pooling=Pooling.MEAN)
    pooler.pool(HIDDEN[:4], [VectorRow(0, 0, 4, computed=4)])
    if ended:
        pooler.end(0)
        pooler.end(5)  # a slot that was never started
    started(pooler, 0, 4, pooling=Pooling.MEAN)
    (result,) = pooler.pool(HIDDEN[4:8], [VectorRow(0, 0, 4, computed=4)]).to_host()
    torch.testing.assert_close(values(result), HIDDEN[4:8].float().mean(0))


def test_normalised_vectors_have_length_one_and_zero_stays_zero() -> None:
    pooler = Pooler(HOST_TRANSFERS)
    for slot in (0, 1):
        request = RequestSpec(id=str(slot), tokens=(1,), params=PoolingParams(pooling=Pooling.LAST))
        pooler.start(Start(slot, request))
    hidden = torch.stack([HIDDEN[0], torch.zeros(6, dtype=torch.bfloat16)])
    unit, zero = pooler.pool(hidden, [VectorRow(0, 0, 1, computed=1), VectorRow(1, 1, 2, computed=1)]).to_host()
    assert values(unit).norm().item() == pytest.approx(1, abs=1e-6)
    assert values(zero).tolist() == [0.0] * 6


def test_a_vector_that_is_not_finite_is_reported() -> None:
    pooler = Pooler(HOST_TRANSFERS)
    started(pooler, 0, 2, pooling=Pooling.MEAN)
    hidden = HIDDEN[:2].clone()
    hidden[1, 3] = float("inf")
    assert pooler.pool(hidden, [VectorRow(0, 0, 2, computed=2)]).to_host() == [b""]

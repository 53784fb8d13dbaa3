"""Triton's sampling kernels draw the tokens of the CPU's, and exact sums make them independent of block sizes.

In Triton's interpreter, or on a GPU if TRITON_INTERPRET is not set.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from every import every
from host_transfers import HOST_TRANSFERS
from kernel_device import kernel_device
from torch import Tensor

from srv.platform.interface import BackendContext, SamplingBatch
from srv_cpu.sampling import CpuSampling

pytest.importorskip("triton", reason="Triton is not installed: pip install srv-kernels[triton]")
from srv_kernels.triton import sampling  # noqa: F401  registers the operators
from srv_kernels.triton.quantized_tuning import DRAW, DrawBlocks, target

DEVICE = kernel_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU here: set TRITON_INTERPRET=1 to interpret the kernels")

OPS = torch.ops.srv_triton
LARGEST_NOISE = 1 - 2.0**-53
CPU = CpuSampling(BackendContext(cast(Any, None), torch.device("cpu"), None, 16, HOST_TRANSFERS))


class Batch(NamedTuple):
    """The arguments of `draw`, on the host."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def rows(self, index: Any) -> Batch:
        return Batch(*(column[index] for column in self))


def draw(batch: Batch) -> list[int]:
    tokens = OPS.draw(*(column.to(DEVICE) for column in batch))
    assert tokens.dtype == torch.int64
    return cast("list[int]", tokens.tolist())


def drawn_by_the_cpu(batch: Batch) -> list[int]:
    flags = {"all_greedy": False, "any_top_k": True, "any_top_p": True, "any_min_p": True}
    return cast("list[int]", CPU.sample(SamplingBatch(*batch, **flags, largest_top_k=batch.logits.shape[1])).tolist())


def same(
    logits: Tensor,
    uniform: float | np.ndarray,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Batch:
    """Rows with the same parameters."""
    rows, vocab = logits.shape
    return Batch(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k or vocab, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.as_tensor(uniform, dtype=torch.float64).expand(rows).contiguous(),
    )


def normal(rows: int, vocab: int, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def mixed(rows: int, vocab: int, seed: int, spread: float, ties: bool) -> Batch:
    """Random logits and parameters, greedy rows among them; `ties`: many logits are equal, as in bfloat16."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    logits = normal(rows, vocab, seed, spread)
    return Batch(
        (logits * 2).round() / 2 if ties else logits,
        one_of(0.0, 0.3, 1.0, 5.0),
        one_of(vocab, vocab, 1, 3, 50, 400).clamp(max=vocab).int(),
        one_of(1e-6, 0.5, 0.95, 1.0, 1.0),
        one_of(0.0, 0.0, 0.1, 1.0),
        torch.rand(rows, dtype=torch.float64, generator=generator),
    )


@every(("vocab", "spread", "ties"), [(1, 2.0, False), (7, 2.0, True), (500, 0.01, False), (500, 30.0, False),
                                     (1024, 2.0, False), (1500, 2.0, True), (1500, 30.0, True)])  # fmt: skip
def test_draws_equal_those_of_the_cpu(vocab: int, spread: float, ties: bool) -> None:
    batch = mixed(64, vocab, vocab, spread, ties)
    assert draw(batch) == drawn_by_the_cpu(batch)


def test_draws_of_a_large_vocabulary_equal_those_of_the_cpu() -> None:
    """Rows whose kept tokens are a few, hundreds, thousands and most of 32,003."""
    batch = mixed(4, 32003, 5, 1.0, ties=True)._replace(
        temperature=torch.full((4,), 1.0),
        top_k=torch.tensor([32003, 32003, 700, 32003], dtype=torch.int32),
        top_p=torch.tensor([0.9, 1.0, 1.0, 0.99999]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0]),
    )
    batch = batch._replace(logits=batch.logits * torch.tensor([[6.0], [2.0], [0.1], [1.0]]))
    assert draw(batch) == drawn_by_the_cpu(batch)


@every("parameters", [{}, {"temperature": 0.3}, {"top_k": 7}, {"top_k": 40}, {"top_p": 0.55}, {"min_p": 0.1},
                      {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.15}])  # fmt: skip
def test_noise_divides_into_one_interval_per_kept_token(parameters: dict[str, Any]) -> None:
    """Evenly spaced noise: in the order of logits, or without filters of ids, and with the share of the probability."""
    count, logits = 512, normal(1, 50, 3)
    tokens = draw(same(logits.expand(count, -1), (np.arange(count) + 0.5) / count, **parameters))
    temperature = parameters.get("temperature", 1.0)
    weights = (logits[0].double() / temperature).softmax(0)
    order = torch.arange(50) if set(parameters) <= {"temperature"} else weights.argsort(descending=True)
    kept = weights[order]
    kept[parameters.get("top_k", 50) :] = 0
    kept /= kept.sum()
    kept[(kept.cumsum(0) - kept) >= parameters.get("top_p", 1.0)] = 0
    kept[kept < parameters.get("min_p", 0.0) * kept.max()] = 0
    shares = (kept / kept.sum()).tolist()
    assert len(set(tokens)) == 1 + sum(a != b for a, b in pairwise(tokens))
    places = {token: place for place, token in enumerate(order.tolist())}
    assert [places[token] for token in tokens] == sorted(places[token] for token in tokens)
    for token, place in places.items():
        assert abs(tokens.count(token) - shares[place] * count) <= 1.0 + 1e-3
        assert shares[place] > 0 or token not in tokens


def test_rows_do_not_depend_on_each_other() -> None:
    batch = mixed(6, 300, 17, 2.0, ties=True)
    together = draw(batch)
    assert [draw(batch.rows(slice(row, row + 1)))[0] for row in range(6)] == together
    order = list(reversed(range(6)))
    assert draw(batch.rows(order)) == [together[row] for row in order]


@every(("rows", "block", "pivots"), [(1, 64, 2), (2, 32, 4), (4, 128, 16)])
def test_block_sizes_do_not_change_a_token(rows: int, block: int, pivots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mixed(4, 100, 23, 3.0, ties=False)
    want = draw(batch)
    monkeypatch.setitem(cast("dict[str, DrawBlocks]", DRAW), target(), DrawBlocks(rows, block, pivots, warps=4))
    assert draw(batch) == want


@every("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_finite_logits_gets_token_0_and_affects_no_other(bad: float) -> None:
    batch = mixed(9, 300, 29, 2.0, ties=False)
    want = draw(batch)
    broken = batch.logits.clone()
    broken[4, 7 if bad > 0 or bad != bad else slice(None)] = bad
    got = draw(batch._replace(logits=broken))
    assert got == [*want[:4], 0, *want[5:]]


@every("parameters", [{}, {"top_k": 40}, {"top_p": 0.999999}, {"min_p": 1e-9}])
def test_masked_tokens_are_never_drawn(parameters: dict[str, Any]) -> None:
    """All but three tokens, or all but one, are at -inf; the random number is at both ends of its range."""
    logits = torch.full((6, 200), -torch.inf)
    logits[:3, [5, 17, 40]] = torch.tensor([1.0, 1.0, 0.5])
    logits[3:, 150] = -3.0
    tokens = draw(same(logits, np.array([0.0, 0.5, LARGEST_NOISE] * 2), **parameters))
    assert set(tokens[:3]) <= {5, 17, 40}
    assert tokens[0] == 5
    assert tokens[3:] == [150] * 3


@every("parameters", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-9}, {"temperature": 0.0}])
def test_extreme_parameters_are_greedy(parameters: dict[str, Any]) -> None:
    logits = normal(6, 100, seed=1)
    noise = np.array([0.0, 0.5, LARGEST_NOISE] * 2)
    assert draw(same(logits, noise, **parameters)) == logits.argmax(-1).tolist()


def test_huge_temperature_is_uniform() -> None:
    logits = normal(1, 64, seed=2).expand(64, -1).contiguous()
    assert draw(same(logits, (np.arange(64) + 0.5) / 64, temperature=1e30)) == list(range(64))


def test_of_equal_logits_the_lowest_token_id_wins() -> None:
    """Zero and minus zero are equal, too."""
    logits = torch.full((3, 300), -1.0)
    logits[:, 200:] = 0.0
    logits[:, 200:260:2] = -0.0
    batch = same(logits, np.array([0.9, 0.4, 0.6]), top_k=2)
    assert draw(batch._replace(temperature=torch.tensor([0.0, 1.0, 1.0]))) == [200, 200, 201]


def test_top_p_counts_within_top_k() -> None:
    """top-p applies after top-k: of (0.4, 0.3 | 0.2, 0.1) two remain, and the first has 0.57 of their weight."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert draw(same(logits, 0.99, top_k=2, top_p=0.55)) == [0]
    assert draw(same(logits, 0.99, top_p=0.55)) == [1]


@every("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_most_likely_tells_which_rows_are_finite(dtype: torch.dtype) -> None:
    wide = normal(300, 1400, seed=4).to(dtype)  # two programs and two blocks
    logits = wide[:, 30:1330]
    logits[3] = 0.5
    logits[5] = 0.0
    logits[5, [800, 1200]] = 7.0
    want = logits.float().numpy().argmax(-1)  # the first among equals
    logits[2, 30], logits[4, 1299], logits[6] = torch.nan, torch.inf, -torch.inf
    tokens, finite = OPS.most_likely(logits.to(DEVICE))
    bad = np.isin(np.arange(300), (2, 4, 6))
    assert finite.dtype == torch.bool
    assert finite.cpu().numpy().tolist() == (~bad).tolist()
    assert tokens.tolist() == np.where(bad, 0, want).tolist()


def test_shapes_without_rows_and_on_the_meta_device() -> None:
    for device in (DEVICE, torch.device("meta")):
        batch = [column.to(cast(torch.device, device)) for column in same(torch.zeros(0, 9), 0.5)]
        assert OPS.draw(*batch).shape == (0,)
        assert [(tensor.shape, tensor.dtype) for tensor in OPS.most_likely(batch[0])] == [
            ((0,), torch.int64),
            ((0,), torch.bool),
        ]


def test_a_vocabulary_whose_sums_could_overflow_is_refused() -> None:
    batch = same(torch.zeros(1, 1 << 19), 0.5)
    with pytest.raises(ValueError, match=r"the vocabulary has 524288 tokens; .* are for 524287 at most"):
        draw(batch)

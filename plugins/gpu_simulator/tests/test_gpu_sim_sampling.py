"""flashinfer.sampling: filters, draws, seeds, captures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

PROBS = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.1, 0.2, 0.3, 0.4]])


def on_gpu(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to("gpusim")


def test_filters(gpu: Any) -> None:
    sampling, probs = gpu.flashinfer.sampling, PROBS.to("gpusim")
    logits = torch.randn(2, 9)
    scaled = logits / torch.tensor([[2.0], [0.5]])
    torch.testing.assert_close(sampling.softmax(logits.to("gpusim"), on_gpu(2.0, 0.5)).cpu(), scaled.softmax(-1))
    actual = sampling.top_k_renorm_probs(probs, on_gpu(2, 1, dtype=torch.int32)).cpu()
    torch.testing.assert_close(actual, torch.tensor([[2 / 3, 1 / 3, 0, 0], [0, 0, 0, 1.0]]))
    actual = sampling.top_p_renorm_probs(probs, on_gpu(0.6, 0.3)).cpu()
    torch.testing.assert_close(actual, torch.tensor([[2 / 3, 1 / 3, 0, 0], [0, 0, 0, 1.0]]))


def counts(draw: Any, rows: int = 4000) -> torch.Tensor:
    """The share of each token of the first row's distribution."""
    samples = draw(PROBS[:1].expand(rows, 4).contiguous().to("gpusim")).cpu()
    assert samples.dtype is torch.int32
    return torch.bincount(samples, minlength=4) / rows


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("sampling_from_probs", (), [0.5, 0.25, 0.15, 0.1]),
        ("min_p_sampling_from_probs", (0.3,), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ("top_k_top_p_sampling_from_probs", (3, 0.8), [2 / 3, 1 / 3, 0, 0]),
        ("top_k_top_p_sampling_from_probs", (3, 0.8, None, "joint"), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
    ],
)
def test_draws_follow_the_distribution(gpu: Any, name: str, arguments: Any, expected: list[float]) -> None:
    draw = getattr(gpu.flashinfer.sampling, name)
    shares = counts(lambda probs: draw(probs, *arguments))
    torch.testing.assert_close(shares, torch.tensor(expected), atol=0.03, rtol=0)
    assert (shares[torch.tensor(expected) == 0] == 0).all()


def test_seeds_and_offsets_decide_and_the_row_too(gpu: Any) -> None:
    sampling = gpu.flashinfer.sampling
    probs = torch.full((64, 50), 0.02).to("gpusim")
    first = sampling.sampling_from_probs(probs, seed=3, offset=0).cpu()
    assert torch.equal(sampling.sampling_from_probs(probs, seed=3, offset=0).cpu(), first)
    assert not torch.equal(sampling.sampling_from_probs(probs, seed=3, offset=4).cpu(), first)
    assert len(set(first.tolist())) > 10  # one seed, but the rows differ
    rows = on_gpu(5, 5, dtype=torch.int64)
    mapped = sampling.sampling_from_probs(PROBS.to("gpusim"), rows * 0 + 1, seed=3, offset=0)
    assert mapped.dtype is torch.int64
    gpu.accelerator.manual_seed(1)
    drawn = sampling.sampling_from_probs(probs).cpu()
    gpu.accelerator.manual_seed(1)
    assert torch.equal(sampling.sampling_from_probs(probs).cpu(), drawn)
    assert not torch.equal(sampling.sampling_from_probs(probs).cpu(), drawn)


def test_a_graph_draws_with_seeds_in_tensors_only(gpu: Any) -> None:
    sampling, probs = gpu.flashinfer.sampling, torch.full((64, 50), 0.02).to("gpusim")
    seed, offset = on_gpu(3, dtype=torch.int64), on_gpu(0, dtype=torch.int64)
    graph = gpu.accelerator.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"^sampling_from_probs: not permitted .* pass seed and offset as tensors"),
        gpu.accelerator.graph(graph),
    ):
        sampling.sampling_from_probs(probs)
    with gpu.accelerator.graph(graph):
        samples = sampling.sampling_from_probs(probs, seed=seed, offset=offset)
    graph.replay()
    first = samples.cpu()
    offset += 4
    graph.replay()
    assert not torch.equal(samples.cpu(), first)
    assert torch.equal(first, sampling.sampling_from_probs(probs, seed=3, offset=0).cpu())


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"top_k": torch.ones(2)}, "top_k: is on cpu, must be on the GPU"),
        ({"top_k": torch.ones(3).to}, r"top_k: is of shape \(3,\), must have shape \(2,\)"),
        ({"probs": PROBS}, "probs: is on cpu"),
        ({"filter_apply_order": "top_p_first"}, "filter_apply_order: is 'top_p_first'"),
        ({"seed": 3}, "seed: is without offset"),
        ({"seed": torch.ones(2).to, "offset": torch.ones(2).to}, "seed: is torch.float32, must be int64 or uint64"),
        ({"generator": torch.Generator()}, "generator: is another one"),
        ({"probs": (PROBS / 0 * 0).to, "check_nan": True}, "probs: is not a number"),
    ],
)
def test_sampling_refuses(gpu: Any, options: Any, refusal: str) -> None:
    moved = {
        name: value("gpusim") if name != "generator" and callable(value) else value for name, value in options.items()
    }
    arguments = {"probs": PROBS.to("gpusim"), "top_k": 2, "top_p": 0.9} | moved
    with pytest.raises(ValueError, match=rf"^top_k_top_p_sampling_from_probs: {refusal}"):
        gpu.flashinfer.sampling.top_k_top_p_sampling_from_probs(**arguments)

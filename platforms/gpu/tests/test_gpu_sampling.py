"""Sampling backends against one another: they draw from one distribution, and rows do not depend on each other."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import context

from srv.platform.interface import SamplingBatch
from srv.platform.manifest import Manifest
from srv_gpu.platform import GpuPlatform

VOCAB = 1000


def batch(device: torch.device, rows: int) -> SamplingBatch:
    """Rows with no filter, top-k, top-p, min-p, all of them, and greedy, in turns."""
    kinds = torch.arange(rows) % 6

    def column(kind: int, value: float, other: float) -> torch.Tensor:
        return torch.where((kinds == kind) | (kinds == 4), value, other)

    return SamplingBatch(
        logits=(3 * torch.randn(rows, VOCAB)).to(device),
        temperature=torch.where(kinds == 5, 0.0, 0.8).to(device),
        top_k=column(1, 20, VOCAB).int().to(device),
        top_p=column(2, 0.7, 1.0).to(device),
        min_p=column(3, 0.05, 0.0).to(device),
        uniform=torch.rand(rows, dtype=torch.float64).to(device),
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
        largest_top_k=20,
    )


@pytest.fixture
def backends(platform: GpuPlatform, manifest: Manifest) -> dict[str, Any]:
    build = context(platform)
    return {spec.name: pkgutil.resolve_name(spec.target)(build) for spec in manifest.facts.backends["sampling"]}


def only(whole: SamplingBatch, row: int) -> SamplingBatch:
    names = ("logits", "temperature", "top_k", "top_p", "min_p", "uniform")
    parts: dict[str, Any] = {name: getattr(whole, name)[row : row + 1] for name in names}
    return replace(whole, **parts)


def test_a_row_does_not_depend_on_the_others(platform: GpuPlatform, backends: dict[str, Any]) -> None:
    assert len(backends) >= 2
    whole = batch(platform.device(0), 12)
    alone = [only(whole, row) for row in range(12)]
    for row, one in enumerate(alone):  # the host skips filters that this row lacks
        has = {"any_top_k": row % 6 in (1, 4), "any_top_p": row % 6 in (2, 4), "any_min_p": row % 6 in (3, 4)}
        alone[row] = replace(one, **has, all_greedy=row % 6 == 5, largest_top_k=20 if has["any_top_k"] else 0)
    for name, backend in backends.items():
        tokens = backend.sample(whole).tolist()
        assert [int(backend.sample(one)) for one in alone] == tokens, name


def test_torch_and_flashinfer_keep_and_draw_the_same_tokens(platform: GpuPlatform, backends: dict[str, Any]) -> None:
    if "flashinfer" not in backends:
        pytest.skip("FlashInfer is for NVIDIA GPUs")
    for seed in range(4):
        torch.manual_seed(seed)
        whole = batch(platform.device(0), 24)
        assert backends["flashinfer"].sample(whole).tolist() == backends["pytorch"].sample(whole).tolist()


def test_triton_draws_within_the_filters_of_torch(platform: GpuPlatform, backends: dict[str, Any]) -> None:
    """In another order of tokens: so with one filter of 1, both draw the most likely token."""
    whole = batch(platform.device(0), 12)
    narrow = replace(whole, top_k=torch.ones_like(whole.top_k), largest_top_k=1)
    best = whole.logits.argmax(-1).tolist()
    assert backends["triton"].sample(narrow).tolist() == best == backends["pytorch"].sample(narrow).tolist()
    top20 = whole.logits.topk(20).indices.tolist()
    tokens = backends["triton"].sample(whole).tolist()
    assert all(tokens[row] in top20[row] for row in range(12) if row % 6 in (1, 4))

"""Which GPU the environment asks to simulate; and that a plain torch is refused by name."""

from __future__ import annotations

import pytest
import torch
from every import every

from srv.errors import PlatformUnavailable
from srv.platform.registry import find_platforms
from srv_gpu.accelerator import load_accelerator
from srv_gpu.facts import triton_target
from srv_gpu.simulator import VARIABLE, VARIANTS, simulated_variant


@every(
    ("value", "platform", "variant"),
    [
        (None, "cuda", None),
        ("", "cuda", None),
        ("sm90", "cuda", "sm90"),
        ("sm90", "rocm", None),
        ("gfx942", "rocm", "gfx942"),
        ("gfx942", "cuda", None),
        ("bmg", "xpu", "bmg"),
    ],
)
def test_a_simulated_gpu_concerns_the_platform_of_its_variant(
    value: str | None, platform: str, variant: str | None
) -> None:
    assert simulated_variant(platform, {} if value is None else {VARIABLE: value}) == variant


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlatformUnavailable) as raised:
        simulated_variant("cuda", {VARIABLE: "sm42"})
    assert raised.value.code == "unknown_simulated_device"
    assert "SRV_GPU_SIMULATOR=sm42 (set by the environment)" in raised.value.reason
    assert "sm120" in raised.value.remedy


def test_every_variant_can_be_simulated() -> None:
    for platform, variants in VARIANTS.items():
        assert find_platforms()[platform].loaded.variants == variants


@every("platform", VARIANTS)
def test_a_torch_for_another_device_is_refused(platform: str) -> None:
    """This suite's torch was built for CPUs."""
    with pytest.raises(PlatformUnavailable, match=f"was built without {platform}") as raised:
        load_accelerator(platform, {})
    assert raised.value.code == f"torch_without_{platform}"


def test_a_torch_without_graphs_of_intel_gpus_is_enough_for_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.8 is such a one. The platform captures no steps."""
    monkeypatch.setattr(torch.version, "xpu", "20250101")
    monkeypatch.delattr(torch.xpu, "XPUGraph", raising=False)
    assert load_accelerator("xpu", {}).device(1) == torch.device("xpu:1")


def test_names_of_triton_s_targets() -> None:
    """Those of the tuning tables."""
    assert [triton_target(name) for name in ("sm90", "sm120", "gfx942", "bmg")] == [
        "sm90",
        "sm120",
        "gfx942",
        "xpu",
    ]

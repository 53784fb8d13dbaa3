"""The conformance kit on simulated AMD and Intel GPUs launches every Triton kernel that the platforms declare.

PyTorch's operators would pass most checks in place of a kernel. The kernels are those of NVIDIA's GPUs, in the same
interpreter, where all checks run (test_conformance_cuda.py): here, one of each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")

from gpu_kit import check_launches, run_kit, run_kit_in_two

CHECKS = (
    *("manifest", "platform", "copies", "pool", "backends.layers", "sampler.greedy", "sampler.exact", "op"),
    *("attention.single_page", "attention.mixed", "attention.long_rows", "attention.int8_kv", "attention.latent"),
    *("graph.declared", "graph.lengths"),
)


@pytest.mark.proof(minutes=7)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("platform", "variant", "engine"),
    [("rocm", "gfx942", ("engine.greedy", "engine.graphs")), ("xpu", "bmg", ("engine.greedy",))],
)
def test_checks_of_each_kind_pass_and_launch_every_kernel(
    platform: str, variant: str, engine: tuple[str, ...], tmp_path: Path
) -> None:
    passed, operators, kernels = run_kit_in_two(tmp_path, platform, variant, "L3", *CHECKS, *engine)
    assert set(engine) <= passed
    check_launches(passed, operators, kernels)


@pytest.mark.proof(minutes=1)
@pytest.mark.parametrize(("platform", "variant"), [("rocm", "gfx942"), ("xpu", "bmg")])
def test_two_ranks_on_two_gpus(platform: str, variant: str, tmp_path: Path) -> None:
    """Every operation of their communicator, and a rank that stays away. An engine of two ranks on cuda is in
    tests/core/args/test_effects_placing.py.
    """
    passed, *_ = run_kit(tmp_path, platform, variant, "L1", "platform.communicator", devices=2)
    assert passed == {"platform.communicator"}

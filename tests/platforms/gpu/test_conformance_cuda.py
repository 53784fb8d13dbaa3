"""The conformance kit on a simulated NVIDIA GPU: all checks up to L2, which launch every Triton kernel, and engines.

A file of its own, because a worker of pytest runs a file at a time, and this one takes as long as the rest of its
folder. Engines in float32 use Triton's attention; that in bfloat16 uses FlashInfer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")

from gpu_kit import check_launches, declared_kernels, declared_operators, run_kit, run_kit_in_two


def test_names_of_what_is_declared() -> None:
    assert {"rms_norm", "linear_gguf", "copy_pages", "paged_decode", "draw"} <= declared_operators()
    assert {"_rms_norm", "reduce_kernel", "gguf_gemv_kernel", "draw_kernel"} <= declared_kernels()


@pytest.mark.proof(minutes=8)
@pytest.mark.timeout(1800)
def test_all_checks_pass_and_launch_every_kernel(tmp_path: Path) -> None:
    check_launches(*run_kit_in_two(tmp_path, "cuda", "sm90", "L2"))


@pytest.mark.proof(minutes=5)
@pytest.mark.timeout(1800)
def test_the_engine(tmp_path: Path) -> None:
    checks = ("engine.greedy", "engine.bfloat16", "engine.graphs", "engine.drafts")
    passed, operators, _ = run_kit(tmp_path, "cuda", "sm90", "L3", *checks)
    assert passed == set(checks)
    assert {"paged_extend", "paged_decode", "write_kv"} <= operators

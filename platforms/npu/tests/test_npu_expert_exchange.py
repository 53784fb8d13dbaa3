"""Rows that go to the experts of other ranks through DeepEP of Ascend, on two simulated cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from every import every

from srv.platform.expert_exchange import ExchangeSizes
from srv_npu.expert_exchange import why_not, why_not_fused

RANK = Path(__file__).parent / "exchange_of_rank.py"
SIZES = ExchangeSizes(experts=64, top_k=8, hidden=4096, max_tokens=512)


@pytest.mark.slow
@pytest.mark.parametrize(("soc", "asynchronous"), [("a3", "1"), ("a2", "0")])
def test_results_are_those_of_all_experts(soc: str, asynchronous: str, tmp_path: Path) -> None:
    environment = os.environ | {
        "SRV_NPU_SIMULATOR": soc,
        "SRV_NPU_SIMULATOR_COUNT": "2",
        "SRV_NPU_SIMULATOR_ASYNCHRONOUS": asynchronous,
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), "2", str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        output, error = rank.communicate(timeout=300)
        assert rank.returncode == 0, error[-3000:]
        found = json.loads(output.splitlines()[-1])
        assert len(found) == (10 if soc == "a3" else 9)
        assert {what: value for what, value in found.items() if value > 0.02} == {}


@every(
    ("sizes", "inner", "variant", "reason"),
    [
        (ExchangeSizes(64, 8, 4096, 256), 1536, "a3", None),
        (SIZES, 1536, "a2", "it needs an A3 or newer, not a2"),
        (SIZES, 1536, "a3", "it takes at most 256 tokens per rank and call, not 512"),
        (ExchangeSizes(64, 13, 4096, 8), 1536, "a3", "13 experts per token are more than 12"),
        (ExchangeSizes(64, 8, 256, 8), 1536, "a3", "rows of 256 elements are not 512 to 7168 long"),
        (ExchangeSizes(64, 8, 4096, 8), 256, "a3", "gate and up of 512 columns are not 1024 to 6144"),
    ],
)
def test_limits_of_the_fused_op(sizes: ExchangeSizes, inner: int, variant: str, reason: str | None) -> None:
    found = why_not_fused(sizes, inner, 8, variant)
    assert found == reason or (reason and found and found.startswith(reason))


@every(
    ("sizes", "ranks", "variant", "normal", "reason"),
    [
        (SIZES, 8, "a2", False, None),
        (SIZES, 8, "a3", True, None),
        (ExchangeSizes(64, 8, 4096, 513), 8, "a3", False, "it takes at most 512 tokens per rank and call, not 513"),
        (ExchangeSizes(64, 8, 4096, 8193), 8, "a3", True, "it takes at most 8192 tokens per rank and call, not 8193"),
        (SIZES, 3, "a3", False, "64 experts are more than 512, or cannot be divided among 3 ranks"),
        (ExchangeSizes(64, 17, 4096, 8), 8, "a3", False, "17 experts per token are more than 16"),
        (
            ExchangeSizes(64, 8, 7200, 8),
            8,
            "a2",
            False,
            "rows of 7200 elements are longer than 7168, or no multiple of",
        ),
        (ExchangeSizes(64, 8, 512, 8), 8, "a3", True, "rows of 512 elements are shorter than 1024"),
        (ExchangeSizes(60, 8, 4096, 8), 6, "a2", True, "it has no configuration for 6 ranks, but for 2, 4, 8"),
    ],
)
def test_limits_of_the_library(
    sizes: ExchangeSizes, ranks: int, variant: str, normal: bool, reason: str | None
) -> None:
    found = why_not(sizes, ranks, variant, normal=normal)
    assert found == reason or (reason and found and found.startswith(reason))

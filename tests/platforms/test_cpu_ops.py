"""The ops that the CPU platform binds on this very processor, each held to its contract."""

from __future__ import annotations

import pytest
import torch

from srv.platform.interface import OpArgs, Platform
from srv.platform.manifest import EngineContext
from srv.platform.ops import Ops
from srv.platform.probe import probe
from srv.platform.registry import find_platforms
from srv_kernels.contracts import CONTRACTS, violations
from srv_matrix.pytest_plugin import covers

SIZES = {"dim": 576, "head_dim": 64, "rotary_dim": 64, "inputs": 576, "outputs": 576}
CASES = [
    pytest.param(
        op,
        dtype,
        marks=covers(f"op:{op}/{str(dtype).removeprefix('torch.')}", platform="cpu"),
        id=f"{op}-{str(dtype)[6:]}",
    )
    for op, contract in CONTRACTS.items()
    for dtype in contract.dtypes
]


@pytest.fixture(scope="module")
def platform() -> Platform:
    found = find_platforms()["cpu"]
    device = probe(found).device
    assert device is not None
    return found.loaded.create(EngineContext(device, 0, 0))


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_op_that_is_bound_here_keeps_its_contract(op: str, dtype: torch.dtype, platform: Platform) -> None:
    contract = CONTRACTS[op]
    bound = Ops("cpu", platform.ops).bind(op, OpArgs(dtype, {name: SIZES[name] for name in contract.sizes}))
    with torch.inference_mode():
        assert violations(contract, bound, dtype) == []

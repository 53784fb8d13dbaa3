"""Experts on the simulated NPU: torch_npu's operators keep the contracts, and a captured layer follows its tokens."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from srv.models.checkpoints.dummy import load_dummy
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import Experts, ExpertSizes
from srv.models.layers.moe_config import ExpertActivation
from srv.platform.facts import OpCall
from srv.platform.ops import Ops
from srv.quantization.layers.int8 import Int8Experts
from srv_kernels.contracts import CONTRACTS, violations
from srv_npu.op_specs import ASCEND, OPS
from srv_npu.platform import NpuPlatform

NAMES = {"route_experts": "torch_npu (npu_moe_gating_top_k)", "experts": ASCEND, "experts_int8": ASCEND}


def op_of(platform: NpuPlatform, op: str) -> Callable[..., Any]:
    (impl,) = [candidate for candidate in platform.ops if (candidate.op, candidate.name) == (op, NAMES[op])]
    return pkgutil.resolve_name(impl.target) if isinstance(impl.target, str) else impl.target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", NAMES)
def test_operators_keep_the_contracts(platform: NpuPlatform, op: str, dtype: torch.dtype) -> None:
    assert violations(CONTRACTS[op], op_of(platform, op), dtype, platform.device(0)) == []


def test_a_captured_layer_follows_other_tokens(platform: NpuPlatform) -> None:
    """Nothing of the routing is a value of the host, so that a replay sends other tokens to other experts."""
    device, npu = platform.device(0), platform._sdk().npu
    route, compute = op_of(platform, "route_experts"), op_of(platform, "experts")
    x, router = torch.randn(3, 32).bfloat16().to(device), torch.randn(32, 8).to(device)
    gate_up, down = torch.randn(8, 64, 32).bfloat16().to(device) / 6, torch.randn(8, 32, 32).bfloat16().to(device) / 6

    def work() -> tuple[Tensor, Tensor]:
        ids, weights = route(x.float() @ router, None, 2, "softmax", True, 1, 1, 1.0)
        return ids, compute(x, ids, weights, gate_up, down, None, None, "silu")

    graph, seen = npu.NPUGraph(), set()
    with npu.graph(graph):
        captured = work()
    for _ in range(3):
        x.copy_(torch.randn(3, 32).bfloat16())
        graph.replay()
        seen.add(tuple(captured[0].flatten().tolist()))
        for replayed, expected in zip(captured, work(), strict=True):
            assert torch.equal(replayed.cpu(), expected.cpu())
    assert len(seen) == 3, "all tokens went to the same experts"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped", "relu2"])
@pytest.mark.parametrize("kind", [Experts, Int8Experts])
def test_operands_are_listed_and_converted_once(
    platform: NpuPlatform, kind: type[Experts | Int8Experts], activation: str
) -> None:
    """After loading, a step lists no matrices and constants, and its results have the same bits."""
    device = platform.device(0)
    ops = Ops("npu", [impl for impl in platform.ops if impl.op != kind.op or impl.name == ASCEND])
    further = {"bias": True} if kind is Experts else {}
    sizes = ExpertSizes(4, 2, 32, 32, cast(ExpertActivation, activation))
    layer = kind(BuildContext(device, torch.bfloat16, ops), "mlp.experts", sizes, **further)
    load_dummy(layer.weight_views(), seed=1)
    x, weights = torch.randn(5, 32).bfloat16().to(device), torch.rand(5, 2).to(device)
    ids = torch.rand(5, 4).argsort(-1)[:, :2].to(device)

    def step() -> tuple[Tensor, int]:
        with Lists() as lists:
            out = layer.kernel(x, ids, weights)
        return out.cpu(), lists.count

    before, listed = step()
    platform.post_load(nn.ModuleList([layer]))
    after, listed_after = step()
    assert before.abs().max() > 0
    assert torch.equal(before, after)
    assert (listed > 0, listed_after) == (True, 0)


class Lists(TorchDispatchMode):
    """Counts the operators that divide a tensor into one per expert."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.unbind.int
        return func(*args, **(kwargs or {}))


def test_what_the_operators_do_not_take_is_refused() -> None:
    checks = {spec.op: spec.check for spec in OPS if spec.name in NAMES.values()}
    device: Any = None  # no rule depends on it
    sizes = {"hidden": 64, "intermediate": 64, "experts": 128, "top_k": 8}

    def reason(op: str, dtype: str = "bfloat16", **changed: int) -> str:
        return checks[op](device, OpCall(dtype, {**sizes, **changed})) or ""

    assert [reason(op) for op in NAMES] == ["", "", ""]
    assert "hidden 65536 is more than the 65535 that npu_grouped_matmul takes" in reason("experts", hidden=65536)
    assert "1025 experts are more than the 1024" in reason("experts", experts=1025)
    assert "129 experts are more than the 128" in reason("experts_int8", experts=129)
    assert "2049 experts are more than the 2048 that npu_moe_gating_top_k takes" in reason(
        "route_experts", experts=2049
    )
    assert "float32 is not" in reason("experts", "float32")

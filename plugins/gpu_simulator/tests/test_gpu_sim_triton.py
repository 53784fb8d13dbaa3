"""Triton operators on the simulated device: values, order, captures, counts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

import triton.language as tl  # noqa: E402

from srv_gpu_simulator import register_triton_operators  # noqa: E402
from srv_gpu_simulator.triton_operators import REFERENCE_VARIABLE, reference_operators  # noqa: E402
from srv_kernels.triton.registration import OPS, triton_op  # noqa: E402


@triton.jit
def _add_scaled(x, y, out, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(x + at, mask=inside) + factor * tl.load(y + at, mask=inside)
    tl.store(out + at, total, mask=inside)


def launch(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    _add_scaled[(triton.cdiv(x.numel(), 16),)](x, y, out, factor, x.numel(), BLOCK=16)


def add_scaled(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    out = torch.empty_like(x)
    launch(x, y, out, factor)
    return out


def add_scaled_(x: torch.Tensor, y: torch.Tensor, factor: float) -> None:
    launch(x, y, x, factor)


def add_scaled_and_keep(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two operands of which one is written: the new sum, and x doubled in place."""
    out = add_scaled(x, y, 1.0)
    launch(x, x, x, 1.0)
    return out


def wrong(x: torch.Tensor) -> torch.Tensor:
    return add_scaled(x, x, 1.0)[:2]


@pytest.fixture(scope="module")
def ops(gpu: Any) -> Any:
    if gpu is None:  # a child process runs the tests
        return None
    triton_op("sim_add(Tensor x, Tensor y, float factor) -> Tensor", lambda x, y, factor: torch.empty_like(x))(
        add_scaled
    )
    triton_op("sim_add_(Tensor(a!) x, Tensor y, float factor) -> ()")(add_scaled_)
    triton_op("sim_both(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: torch.empty_like(x))(add_scaled_and_keep)
    triton_op("sim_wrong(Tensor x) -> Tensor", lambda x: torch.empty_like(x))(wrong)
    register_triton_operators(gpu.accelerator)
    register_triton_operators(gpu.accelerator)  # once is enough, and twice is no error
    return torch.ops.srv_triton


X, Y = torch.arange(40.0), torch.ones(40)


def test_a_launch_computes_on_device_memory_and_is_counted(gpu: Any, ops: Any) -> None:
    gpu.accelerator.launches.clear()
    x, y = X.to("gpusim"), Y.to("gpusim")
    z = ops.sim_add(x, y, 3.0)
    assert z.device == torch.device("gpusim", 0)
    assert torch.equal(z.cpu(), X + 3)
    assert ops.sim_add_(x, y, 2.0) is None
    assert torch.equal(x.cpu(), X + 2)
    assert torch.equal(ops.sim_both(x, y).cpu(), X + 3)
    assert torch.equal(x.cpu(), 2 * X + 4)
    assert gpu.accelerator.launches == {"sim_add": 1, "sim_add_": 1, "sim_both": 1}
    assert gpu.accelerator.launches.keys() - OPS.keys() == set()


def test_a_view_with_strides_is_read_in_place(gpu: Any, ops: Any) -> None:
    rows = torch.zeros(4, 40, device="gpusim")
    ops.sim_add_(rows[2], Y.to("gpusim"), 5.0)
    assert rows.cpu().sum(-1).tolist() == [0, 0, 200, 0]


def test_a_large_operand_is_not_copied(gpu: Any, ops: Any) -> None:
    pool = torch.zeros(4 << 30, dtype=torch.uint8, device="gpusim").view(torch.float32)
    ops.sim_add_(pool[12345 : 12345 + 40], Y.to("gpusim"), 1.0)
    assert pool[12344:12387].cpu().sum() == 40


def test_a_graph_records_launches(gpu: Any, ops: Any) -> None:
    cuda = gpu.accelerator
    x, y = X.to("gpusim"), Y.to("gpusim")
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        z = ops.sim_add(ops.sim_add(x, y, 1.0), y, 1.0)
        ops.sim_add_(y, y, 0.0)
    assert z.cpu().isnan().all()
    x.copy_(X + 7)
    graph.replay()
    assert torch.equal(z.cpu(), X + 9)


def test_launches_are_in_order_with_their_stream(deferred: Any, ops: Any) -> None:
    x, y = X.to("gpusim"), Y.to("gpusim")
    z = ops.sim_add(x, y, 1.0)
    ops.sim_add_(z, y, 1.0)
    x.zero_()
    host = deferred.accelerator.pinned((40,), torch.float32)
    host.copy_(z, non_blocking=True)
    assert host.isnan().all()
    deferred.accelerator.current_stream().synchronize()
    assert torch.equal(host, X + 2)


def test_launches_refuse(gpu: Any, ops: Any) -> None:
    x = X.to("gpusim")
    with pytest.raises(ValueError, match=r"^sim_add: was given a tensor on cpu of shape \(40,\)"):
        ops.sim_add(x, Y, 1.0)
    with pytest.raises(RuntimeError, match=r"`like` says torch.float32 of shape \(40,\), but the launch returned"):
        ops.sim_wrong(x)
    triton_op("sim_unlike(Tensor x) -> Tensor")(wrong)
    with pytest.raises(
        RuntimeError, match="srv_triton::sim_unlike returns new tensors, but was registered without `like`"
    ):
        register_triton_operators(gpu.accelerator)
    del OPS["sim_unlike"]


def test_the_reference_of_an_operator_replaces_its_kernel(
    gpu: Any, ops: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of one block of Q8_0: a half-precision scale of 2 and 32 weights."""
    import srv_kernels.triton.gguf_linear  # noqa: F401  registers the operators

    monkeypatch.setenv(REFERENCE_VARIABLE, "linear_gguf")
    register_triton_operators(gpu.accelerator)
    gpu.accelerator.launches.clear()
    weights = torch.arange(64, dtype=torch.int8).view(2, 32) - 20
    scale = torch.tensor([2.0], dtype=torch.float16).view(torch.uint8).expand(2, 2)
    rows = torch.cat((scale, weights.view(torch.uint8)), 1).to("gpusim")
    product = ops.linear_gguf(torch.ones(1, 32).to("gpusim"), rows, "Q8_0")
    table = ops.rows_gguf(rows, "Q8_0", torch.tensor([1]).to("gpusim"), torch.float32)
    assert product.cpu().tolist() == [[2.0 * int(row.sum()) for row in weights.int()]]
    assert table.cpu().tolist() == [(2.0 * weights[1]).tolist()]
    assert gpu.accelerator.launches == {"linear_gguf (reference)": 1, "rows_gguf": 1}
    assert caplog.messages == [f"{REFERENCE_VARIABLE}: no kernel runs for linear_gguf, but the reference on the host"]


def test_an_operator_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"names paged_decode, copy_pages; there are references for .*linear_gguf"):
        reference_operators({REFERENCE_VARIABLE: "paged_decode, copy_pages"})
    assert reference_operators({}) == {}

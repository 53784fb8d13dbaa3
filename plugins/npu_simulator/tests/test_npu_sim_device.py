"""The card: PyTorch's operators, mixed devices, memory, streams, identity."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F

GIB = 1 << 30
GRANULE = 512


def test_it_reports_that_it_is_simulated(sdk: Any) -> None:
    assert sdk.npu is torch.npu
    assert "simulated" in sdk.npu.get_device_name()
    assert sdk.npu.get_device_name(0).startswith("Ascend910B3")
    properties = sdk.npu.get_device_properties(0)
    assert "simulated" in properties.name
    assert properties.total_memory == 64 * GIB
    assert sdk.npu.get_soc_version() == 223
    assert "simulated" in sdk.__version__


def test_there_is_one_card(sdk: Any) -> None:
    assert sdk.npu.is_available()
    assert sdk.npu.device_count() == 1
    sdk.npu.set_device("npu:0")
    assert sdk.npu.current_device() == 0
    with pytest.raises(RuntimeError, match="npu:1 was asked for, but there is one device"):
        sdk.npu.set_device(1)
    with pytest.raises(RuntimeError, match="npu:1 was asked for, but this process has one device, npu:0"):
        torch.empty(1, device="npu:1")


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
INDEX = torch.tensor([4, 0, 3])

OPERATIONS: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "arithmetic": (lambda x: (x + x) * 2 - x / 3 + 1.5, (X,)),
    "linear": (lambda x, w: F.linear(x.half(), w.half(), w[0].half()), (X, W)),
    "matmul": (lambda x, w: (x @ w, torch.bmm(x[None], w[None]), torch.einsum("ab,cb->ac", x, w)), (X, W)),
    "embedding": (lambda i, x: (F.embedding(i, x), x[i], x.index_select(0, i)), (INDEX, X)),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(-1), x.argmax(-1), x.logsumexp(0)), (X,)),
    "sort": (lambda x: (x.sort(descending=True), x.topk(3), x.cumsum(-1)), (X,)),
    "views": (lambda x: (x.view(-1, 4), x.t(), x.chunk(2, -1), x[1:4, ::2], x.unsqueeze(1).expand(6, 2, 8)), (X,)),
    "join": (lambda x, w: (torch.cat([x, w]), torch.stack([x, x]), x.repeat(2, 1)), (X, W)),
    "cast": (lambda x: (x.bfloat16(), x.int(), x.to(torch.float64), x > 0), (X,)),
    "index_put": (lambda x, i: x.clone().index_put_((i,), x[:3]), (X, INDEX)),
    "new": (lambda x: (torch.zeros_like(x), x.new_full((2,), 3), torch.arange(5, device=x.device)), (X,)),
    "masked": (lambda x: (x.masked_fill(x > 0, 0.5), torch.where(x > 0, x, 0.0), x[x > 0]), (X,)),
}


def flat(result: Any) -> list[torch.Tensor]:
    return [one for value in result for one in flat(value)] if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operators_return_the_same_as_on_the_host(sdk: Any, name: str) -> None:
    operation, operands = OPERATIONS[name]
    expected = flat(operation(*operands))
    actual = flat(operation(*(one.to("npu:0") for one in operands)))
    for one, other in zip(actual, expected, strict=True):
        assert one.device == torch.device("npu", 0)
        assert torch.equal(one.cpu(), other)


def test_a_module_moves_and_computes(sdk: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4))
    expected = module(X).detach()
    actual = module.to("npu:0")(X.to("npu:0"))
    torch.testing.assert_close(actual.detach().cpu(), expected)


@pytest.mark.parametrize(
    ("operator", "act"),
    [
        ("aten::add.Tensor", lambda x: x + torch.ones(8)),
        ("aten::mm", lambda x: x @ W),
        ("aten::index.Tensor", lambda x: x[INDEX]),
        ("aten::index_copy", lambda x: x.index_copy_(0, INDEX, x[:3])),
        ("aten::cat", lambda x: torch.cat([x, X])),
        ("aten::add_.Tensor", lambda x: torch.ones(()).add_(x[0, 0])),
    ],
)
def test_mixed_devices_are_refused(sdk: Any, operator: str, act: Any) -> None:
    with pytest.raises(RuntimeError, match=rf"^{operator}.*: expected all tensors to be on the same device") as caught:
        act(X.to("npu:0"))
    assert "on npu:0" in str(caught.value)
    assert "on cpu" in str(caught.value)


def test_host_numbers_and_copies_may_mix(sdk: Any) -> None:
    x = X.to("npu:0")
    assert torch.equal((x * torch.tensor(2.0)).cpu(), X * 2)
    x[1] = torch.zeros(8)
    x.copy_(X)
    host = torch.empty_like(X)
    host.copy_(x)
    assert torch.equal(host, X)


def test_memory_is_counted_in_granules_from_first_to_last_reference(sdk: Any) -> None:
    gc.collect()
    free, total = sdk.npu.mem_get_info()
    assert total == 64 * GIB
    before = sdk.npu.memory_allocated()
    assert free == total - before
    x = torch.empty(100, dtype=torch.uint8, device="npu:0")
    assert sdk.npu.memory_allocated() == before + GRANULE
    view = x[10:20]
    del x
    assert sdk.npu.memory_allocated() == before + GRANULE
    del view
    assert sdk.npu.memory_allocated() == before
    y = torch.zeros(3 * GRANULE + 1, dtype=torch.uint8, device="npu:0")
    assert sdk.npu.mem_get_info()[0] == free - 4 * GRANULE
    sdk.npu.reset_peak_memory_stats()
    z = y + y
    assert sdk.npu.max_memory_allocated() == before + 8 * GRANULE
    del z
    assert sdk.npu.memory_stats()["allocated_bytes.all.current"] == before + 4 * GRANULE


def test_results_of_torch_npus_operators_are_counted(sdk: Any) -> None:
    x, gamma = torch.zeros(64, 256).half().to("npu:0"), torch.zeros(256).half().to("npu:0")
    before = sdk.npu.memory_allocated()
    y, rstd = sdk.npu_rms_norm(x, gamma)
    assert rstd.nbytes == 256
    assert sdk.npu.memory_allocated() == before + y.nbytes + GRANULE


def test_too_little_memory_is_an_error_without_side_effects(sdk: Any) -> None:
    before = sdk.npu.memory_allocated()
    large = torch.empty(40 * GIB, dtype=torch.uint8, device="npu:0")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"NPU out of memory. Tried to allocate 42949672960 bytes on npu:0"
    ):
        torch.empty(40 * GIB, dtype=torch.uint8, device="npu:0")
    del large
    assert sdk.npu.memory_allocated() == before
    assert torch.zeros(3, device="npu:0").cpu().tolist() == [0, 0, 0]


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_zeroed_pool_larger_than_host_memory_uses_none(sdk: Any) -> None:
    before = resident()
    pool = torch.zeros(50, GIB, dtype=torch.uint8, device="npu:0")
    pool[7, 5] = 3
    assert pool[7, 4:7].cpu().tolist() == [0, 3, 0]
    pool.zero_()
    assert pool[7, 4:7].cpu().tolist() == [0, 0, 0]
    assert resident() - before < 256 << 20


def test_a_device_address_is_no_host_address(sdk: Any) -> None:
    assert torch.ones(3, device="npu:0").data_ptr() > 1 << 54


def test_a_copy_to_the_host_arrives_when_the_host_has_waited(sdk: Any) -> None:
    x = torch.arange(3.0).to("npu:0")
    host = x.to("cpu", non_blocking=True)
    assert host.isnan().all()
    event = sdk.npu.Event()
    event.record()
    x += 1  # the copy reads in program order
    event.synchronize()
    assert host.tolist() == [0, 1, 2]


def test_a_copy_to_the_card_needs_its_host_memory_until_it_is_done(sdk: Any) -> None:
    """torch_npu enqueues only the address."""
    sdk.npu.synchronize()
    host_values = torch.arange(3.0)
    x = host_values.to("npu:0", non_blocking=True)
    sdk.npu.synchronize()
    assert x.cpu().tolist() == [0, 1, 2]
    torch.arange(3.0).to("npu:0")  # waits, and needs nothing
    sdk.npu.synchronize()
    x.copy_(torch.arange(3.0), non_blocking=True)
    event = sdk.npu.Event()
    event.record()
    with pytest.raises(RuntimeError, match=r"host tensor \(torch.float32 of shape \(3,\)\) .* was freed before"):
        event.synchronize()
    event.synchronize()


def test_streams_and_events(sdk: Any) -> None:
    x = torch.arange(3).to("npu:0")
    side = sdk.npu.Stream()
    with sdk.npu.stream(side):
        assert sdk.npu.current_stream() is side
        host = x.to("cpu", non_blocking=True)
    assert sdk.npu.current_stream() is sdk.npu.default_stream()
    start, end = sdk.npu.Event(enable_timing=True), sdk.npu.Event(enable_timing=True)
    start.record(side)
    end.record(side)
    assert not end.query()
    sdk.npu.current_stream().wait_stream(side)
    sdk.npu.synchronize()
    assert end.query()
    assert host.tolist() == [0, 1, 2]
    assert start.elapsed_time(end) >= 0
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(sdk.npu.Event())


def test_random_numbers_follow_the_seed(sdk: Any) -> None:
    torch.manual_seed(7)
    first = torch.rand(5, device="npu:0").cpu()
    torch.npu.manual_seed(7)
    assert torch.equal(torch.rand(5, device="npu:0").cpu(), first)
    with pytest.raises(RuntimeError, match="expected the generator of npu:0"):
        torch.empty(5, device="npu:0").uniform_(generator=torch.Generator())

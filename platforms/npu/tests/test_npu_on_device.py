"""The live platform keeps the contract on the (simulated) device: memory, pool, ops, weights, graphs, diagnosis."""

from __future__ import annotations

import pkgutil

import pytest
import torch
from torch import nn

from srv.errors import InternalError, PlatformUnavailable
from srv.memory.layout import KVLayout
from srv.models.facts import CacheGroup
from srv.models.layers import Linear, Place
from srv.models.loaders.dummy import load_dummy
from srv.models.quantized import DynamicInt8Linear, StaticInt8Linear
from srv.platform.contract import check_platform
from srv.platform.interface import OpArgs, Platform
from srv.platform.ops import Ops
from srv_kernels.contracts import CONTRACTS, violations
from srv_npu.facts import FACTS
from srv_npu.limits import KV_ORDER, PAGE
from srv_npu.platform import NpuPlatform
from srv_npu.weights import FRACTAL_NZ, may_cast

GROUP = CacheGroup("full", (0, 1, 2), kv_heads=2, key_dim=64, value_dim=64)
DTYPES = (torch.bfloat16, torch.float16)


def test_it_keeps_the_contract(platform: NpuPlatform) -> None:
    check_platform(platform, "srv", name="npu", api=(1, 1))
    assert isinstance(platform, Platform)


def test_a_rank_without_a_device_of_its_own_is_refused(platform: NpuPlatform) -> None:
    assert platform.device(0) == torch.device("npu", 0)
    with pytest.raises(PlatformUnavailable, match="rank 1"):
        platform.device(1)


def test_memory_is_the_devices(platform: NpuPlatform) -> None:
    device = platform.device(0)
    before = platform.memory(device)
    taken = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    now = platform.memory(device)
    assert now.total == before.total > 30 << 30
    assert before.free - now.free >= taken.numel()


def test_an_event_covers_copies_that_were_asked_for_before(platform: NpuPlatform) -> None:
    host = torch.arange(3, device=platform.device(0)).to("cpu", non_blocking=True)
    platform.record_event(platform.device(0)).synchronize()
    assert host.tolist() == [0, 1, 2]


def test_the_pool_has_the_shape_that_the_attention_reads_and_is_zero(platform: NpuPlatform) -> None:
    kv = platform.kv_buffers(KVLayout(GROUP, PAGE, "bfloat16", KV_ORDER), pages=5)
    assert [tuple(buffer.shape) for buffer in (*kv.keys, *kv.values)] == [(6, 128, 128)] * 6
    for buffer in (*kv.keys, *kv.values):
        assert (buffer.device, buffer.dtype) == (platform.device(0), torch.bfloat16)
        assert not buffer.any()
    with pytest.raises(InternalError, match="page_token_head"):
        platform.kv_buffers(KVLayout(GROUP, PAGE, "bfloat16"), pages=5)


def test_backends_are_what_the_facts_name() -> None:
    for specs in FACTS.backends.values():
        for spec in specs:
            assert isinstance(pkgutil.resolve_name(spec.target), type)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", CONTRACTS)
def test_ops_keep_their_contracts_on_the_device(platform: NpuPlatform, op: str, dtype: torch.dtype) -> None:
    implementation = Ops("npu", platform.ops).bind(op, OpArgs(dtype, {}))
    assert violations(CONTRACTS[op], implementation, dtype, platform.device(0)) == []


def test_ops_are_torch_npus_own(platform: NpuPlatform) -> None:
    assert {impl.op for impl in platform.ops} == set(CONTRACTS)
    assert all("torch_npu" in impl.name for impl in platform.ops)


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "cast"),
    [
        (64, 48, torch.bfloat16, True),
        (64, 48, torch.float16, True),
        (64, 40, torch.bfloat16, False),
        (72, 48, torch.bfloat16, False),
        (64, 48, torch.float32, False),
    ],
)
def test_weights_are_cast_where_the_format_can_hold_them(
    platform: NpuPlatform, outputs: int, inputs: int, dtype: torch.dtype, cast: bool
) -> None:
    device = platform.device(0)
    linear = Linear(Place(device, dtype, Ops("npu", platform.ops)), {"weight": outputs}, inputs, bias=False)
    weight = torch.randn(outputs, inputs).to(dtype)
    linear.weight.copy_(weight)
    assert may_cast(linear) is cast
    platform.post_load(nn.ModuleList([linear]))
    assert (platform._sdk().get_npu_format(linear.weight) == FRACTAL_NZ) is cast
    x = torch.randn(3, inputs).to(dtype)
    torch.testing.assert_close(linear(x.to(device)).cpu(), x @ weight.T, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("outputs", "inputs", "cast"), [(64, 48, True), (48, 48, False), (64, 40, False)])
@pytest.mark.parametrize("kind", [DynamicInt8Linear, StaticInt8Linear])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_8_bits_are_turned_round_and_cast(
    platform: NpuPlatform,
    kind: type[DynamicInt8Linear | StaticInt8Linear],
    outputs: int,
    inputs: int,
    cast: bool,
    dtype: torch.dtype,
) -> None:
    """The operator reads [inputs, outputs], and what it gives is what the op gave before."""
    place = Place(platform.device(0), dtype, Ops("npu", platform.ops))
    further = {"bias": True} if kind is DynamicInt8Linear else {}
    linear = kind(place, {"first": 16, "second": outputs - 16}, inputs, **further)
    load_dummy(linear.targets(), seed=1)
    assert linear.settle() is None
    assert may_cast(linear) is cast
    x = torch.randn(5, inputs).to(dtype).to(platform.device(0))
    before = linear(x).cpu()
    platform.post_load(nn.ModuleList([linear]))
    columns = linear.kernel.keywords["columns"]  # type: ignore[attr-defined]
    assert tuple(columns.shape) == (inputs, outputs)
    assert (platform._sdk().get_npu_format(columns) == FRACTAL_NZ) is cast
    assert linear.weight.numel() == 0
    assert torch.equal(linear(x).cpu(), before)


def test_a_weight_that_is_also_the_embedding_stays_as_it_is(platform: NpuPlatform) -> None:
    place = Place(platform.device(0), torch.bfloat16, Ops("npu", platform.ops))
    shared = Linear(place, {"head": 64}, 32, bias=False, weight=place.empty(64, 32))
    platform.post_load(nn.ModuleList([shared]))
    assert platform._sdk().get_npu_format(shared.weight) != FRACTAL_NZ


def test_the_diagnosis_computes(platform: NpuPlatform) -> None:
    checks = {check.name: check for check in platform.diagnose()}
    assert checks.keys() == {"device", "versions", "memory", "compute"}
    assert all(check.ok for check in checks.values())
    assert "right" in checks["compute"].detail


def test_a_graph_that_was_not_captured_is_not_replayed(platform: NpuPlatform) -> None:
    assert platform.graphs is not None
    with pytest.raises(InternalError, match="a step of 77 rows"):
        platform.graphs.replay(77, None)

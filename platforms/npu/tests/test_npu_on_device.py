"""The live platform keeps the contract on the (simulated) device: memory, pool, ops, weights, graphs, diagnosis."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from srv.errors import InternalError, PlatformUnavailable
from srv.models.checkpoints.dummy import load_dummy
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LocalSizes
from srv.models.layers.linear import Linear
from srv.platform.capabilities import OPS_OF
from srv.platform.contract import check_platform
from srv.platform.experts import EXPERTS, INT8, MOE_FAMILY, ROUTE
from srv.platform.interface import GraphKey, OpArgs
from srv.platform.ops import Ops
from srv.quantization.layers.int8 import DynamicInt8Linear, StaticInt8Linear
from srv.specs import FullAttention, KVLayout, Latent, Recurrent, StateTensor
from srv.testing.conformance.ops import MODEL_OPS
from srv_kernels.contracts import CONTRACTS, violations
from srv_npu.facts import FACTS
from srv_npu.graphs import NpuGraphs
from srv_npu.limits import KV_ORDER, PAGE
from srv_npu.manifest import MANIFEST
from srv_npu.platform import NpuPlatform
from srv_npu.weights import FRACTAL_NZ, may_cast

GROUP = FullAttention((0, 1, 2), kv_heads=2, key_dim=64, value_dim=64)
DTYPES = (torch.bfloat16, torch.float16)


def test_it_keeps_the_contract(platform: NpuPlatform) -> None:
    check_platform(platform, "srv", name="npu", api=MANIFEST.api)


def test_a_rank_without_a_device_of_its_own_is_refused(platform: NpuPlatform) -> None:
    assert platform.device(0) == torch.device("npu", 0)
    with pytest.raises(PlatformUnavailable, match="device 1 is needed"):
        platform.device(1)


def test_ranges_for_msprof_nest(platform: NpuPlatform) -> None:
    marks = platform._sdk().npu.mstx
    with platform.profiler_range("layer"), platform.profiler_range("layer.attention"):
        pass
    assert marks.finished == {("layer", "layer.attention"): 1, ("layer",): 1}


def test_kernels_are_not_compiled_at_work(platform: NpuPlatform) -> None:
    assert platform._sdk().npu.is_jit_compile_false()


def test_memory_is_the_devices(platform: NpuPlatform) -> None:
    device = platform.device(0)
    before = platform.memory(device)
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    now = platform.memory(device)
    assert now.total == before.total > 30 << 30
    assert before.free - now.free >= memory.numel()


def test_an_event_covers_copies_that_were_asked_for_before(platform: NpuPlatform) -> None:
    host = torch.arange(3, device=platform.device(0)).to("cpu", non_blocking=True)
    platform.streams(platform.device(0)).compute.record().synchronize()
    assert host.tolist() == [0, 1, 2]


def test_the_pool_has_the_shape_that_the_attention_reads_and_is_zero(platform: NpuPlatform) -> None:
    kv = platform.kv_buffers(KVLayout(GROUP, PAGE, "bfloat16", KV_ORDER), pages=5)
    assert [tuple(buffer.shape) for buffer in (*kv.keys, *kv.values)] == [(6, 128, 128)] * 6
    for buffer in (*kv.keys, *kv.values):
        assert (buffer.device, buffer.dtype) == (platform.device(0), torch.bfloat16)
        assert not buffer.any()
    with pytest.raises(InternalError, match="page_token_head"):
        platform.kv_buffers(KVLayout(GROUP, PAGE, "bfloat16"), pages=5)
    latents = platform.kv_buffers(KVLayout(Latent((0, 1), 512, 64), PAGE, "bfloat16"), pages=5)
    assert [tuple(tensor.shape) for tensor in latents.all()] == [(6, PAGE, 512)] * 2 + [(6, PAGE, 64)] * 2
    states = platform.kv_buffers(
        KVLayout(Recurrent((0, 1), (StateTensor("state", (2, 8, 8), "float16"),)), PAGE, "bfloat16"), pages=5
    )
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in states.all()] == [((6, 2, 8, 8), torch.float16)] * 2


def test_backends_are_what_the_facts_name() -> None:
    for family, specs in FACTS.backends.items():
        for spec in specs:
            if family == MOE_FAMILY:  # the ops of its name
                assert any((op.op, op.name) == (EXPERTS, spec.name) for op in FACTS.ops)
            else:
                assert isinstance(pkgutil.resolve_name(spec.target), type)


# All but those of capabilities that NPUs do not have.
OPS = (*MODEL_OPS, *OPS_OF["w8a8"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_ops_keep_their_contracts_on_the_device(platform: NpuPlatform, op: str, dtype: torch.dtype) -> None:
    implementation = Ops("npu", platform.ops).bind(op, OpArgs(dtype, {}))
    assert violations(CONTRACTS[op], implementation, dtype, platform.device(0)) == []


def test_ops_are_torch_npus_own(platform: NpuPlatform) -> None:
    """But those of recurrent layers, which torch_npu has not: they are compositions of PyTorch's operators."""
    composed = {name for name, contract in CONTRACTS.items() if "recurrent_reference" in contract.reference}
    assert {impl.op for impl in platform.ops} == {*OPS, ROUTE, EXPERTS, INT8, *composed}
    assert all("torch_npu" in impl.name or impl.op in (ROUTE, EXPERTS, INT8, *composed) for impl in platform.ops)


def bound(platform: NpuPlatform, op: str, dtype: torch.dtype, **sizes: int) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = Ops("npu", platform.ops).bind(op, OpArgs(dtype, sizes))
    return function


@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_take_inputs_of_any_strides(platform: NpuPlatform, dtype: torch.dtype) -> None:
    """A slice of a wider matrix, and a transposed one, give what their copies give."""
    device = platform.device(0)
    weight = torch.randint(-128, 128, (32, 64), dtype=torch.int8).to(device)
    scales, one = torch.rand(32).to(device), torch.ones(1).to(device)
    further: dict[str, tuple[torch.Tensor | None, ...]] = {
        "silu_and_mul": (),
        "linear_w8a8": (weight, scales, None),
        "linear_w8a8_static": (weight, one / 16, one, torch.arange(32, dtype=torch.int32).to(device), scales),
    }
    wide = torch.randn(64, 96).to(dtype).to(device)
    for op, rest in further.items():
        run = bound(platform, op, dtype, inputs=64, outputs=32)
        for x in (wide[:, 16:80], wide.t()[:5]):
            assert not x.is_contiguous()
            assert torch.equal(run(x, *rest).cpu(), run(x.contiguous(), *rest).cpu()), op


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fixed_rounding_is_computed_in_float32(platform: NpuPlatform, dtype: torch.dtype) -> None:
    """In 16 bits, some of these inputs would be rounded to another step."""
    x, scale, offset = (torch.randn(8, 64) * 30).to(dtype), torch.tensor([0.7713]), torch.tensor([0.375])
    weight = torch.eye(64, dtype=torch.int8)
    operands = (x, weight, scale, offset, torch.zeros(64, dtype=torch.int32), torch.ones(64))
    actual = bound(platform, "linear_w8a8_static", dtype)(*(operand.to(platform.device(0)) for operand in operands))
    want, narrow = (
        (x.to(wide) * (1 / scale).to(wide) + offset.to(wide)).round().clamp(-128, 127).float()
        for wide in (torch.float32, dtype)
    )
    assert torch.equal(actual.cpu().float(), want)
    assert not torch.equal(narrow, want)


HEAD = 65535 + 97  # outputs: more than one matmul takes, and a multiple of 32


@pytest.mark.parametrize("kind", [DynamicInt8Linear, StaticInt8Linear])
def test_a_head_of_more_outputs_than_one_matmul_takes(
    platform: NpuPlatform, kind: type[DynamicInt8Linear | StaticInt8Linear]
) -> None:
    """Before and after its weight is packed, each output is what a small layer of its own weight gives."""
    place = BuildContext(platform.device(0), torch.float16, Ops("npu", platform.ops))
    further = {"bias": True} if kind is DynamicInt8Linear else {}
    head, last = (kind(place, LocalSizes({"head": outputs}, 32), **further) for outputs in (HEAD, 160))
    load_dummy(head.weight_views(), seed=1)
    (operands,) = head.operands()
    if "quant_bias" in operands:
        operands["quant_bias"].copy_(torch.arange(HEAD, dtype=torch.int32) % 1000)
    for name, whole in head.weight_views().items():
        last.weight_views()[name].copy_(whole[-160:] if len(whole) == HEAD else whole)
    x = torch.randn(2, 32).half().to(platform.device(0))
    want = last(x).cpu()
    assert want.any()
    before = head(x)
    assert tuple(before.shape) == (2, HEAD)
    assert torch.equal(before[:, -160:].cpu(), want)
    platform.post_load(nn.ModuleList([head]))
    shards = head.kernel.keywords["shards"]  # type: ignore[attr-defined]
    assert [tuple(shard.shape) for shard in shards] == [(32, 65504), (32, HEAD - 65504)]
    assert all(platform._sdk().get_npu_format(shard) == FRACTAL_NZ for shard in shards)
    assert torch.equal(head(x).cpu(), before.cpu())


@pytest.mark.parametrize("op", ["linear_w8a8", "linear_w8a8_static"])
def test_more_inputs_than_one_matmul_takes_are_refused(platform: NpuPlatform, op: str) -> None:
    (offered,) = (impl for impl in platform.ops if impl.op == op)
    assert offered.supports_args(OpArgs(torch.float16, {"inputs": 65535, "outputs": 64})) is None
    assert "65536 input features" in str(offered.supports_args(OpArgs(torch.float16, {"inputs": 65536, "outputs": 64})))


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
    linear = Linear(BuildContext(device, dtype, Ops("npu", platform.ops)), {"weight": outputs}, inputs, bias=False)
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
def test_int8_weights_are_transposed_and_cast(
    platform: NpuPlatform,
    kind: type[DynamicInt8Linear | StaticInt8Linear],
    outputs: int,
    inputs: int,
    cast: bool,
    dtype: torch.dtype,
) -> None:
    """The operator reads [inputs, outputs], and its output equals that of the op before the cast."""
    place = BuildContext(platform.device(0), dtype, Ops("npu", platform.ops))
    further = {"bias": True} if kind is DynamicInt8Linear else {}
    linear = kind(place, LocalSizes({"first": 16, "second": outputs - 16}, inputs), **further)
    load_dummy(linear.weight_views(), seed=1)
    assert linear.validate_loaded() is None
    assert may_cast(linear) is cast
    x = torch.randn(5, inputs).to(dtype).to(platform.device(0))
    before = linear(x).cpu()
    platform.post_load(nn.ModuleList([linear]))
    (shard,) = linear.kernel.keywords["shards"]  # type: ignore[attr-defined]
    instances = {impl.target.__self__ for impl in platform.ops if hasattr(impl.target, "__self__")}
    assert {linear.kernel.func.__self__} == instances  # type: ignore[attr-defined]
    assert tuple(shard.shape) == (inputs, outputs)
    assert (platform._sdk().get_npu_format(shard) == FRACTAL_NZ) is cast
    assert linear.weight.numel() == 0
    assert torch.equal(linear(x).cpu(), before)


def test_a_weight_that_is_also_the_embedding_stays_as_it_is(platform: NpuPlatform) -> None:
    context = BuildContext(platform.device(0), torch.bfloat16, Ops("npu", platform.ops))
    shared = Linear(context, {"head": 64}, 32, bias=False, weight=context.empty(64, 32))
    platform.post_load(nn.ModuleList([shared]))
    assert platform._sdk().get_npu_format(shared.weight) != FRACTAL_NZ


def test_the_diagnosis_computes(platform: NpuPlatform) -> None:
    checks = {check.name: check for check in platform.diagnose()}
    assert checks.keys() == {"device", "versions", "memory", "compute"}
    assert all(check.ok for check in checks.values())
    assert "right" in checks["compute"].detail


def test_a_graph_that_was_not_captured_is_not_replayed(platform: NpuPlatform) -> None:
    assert platform.graphs is not None
    with pytest.raises(InternalError, match="decode steps of 77 rows, 1 token each"):
        platform.graphs.replay(GraphKey("decode", 77), None)


class Watched:
    """The SDK's device functions. Every pool that is made is another, and the pool of every capture is written down."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        self.made = 0
        self.pools: list[Any] = []

    def graph_pool_handle(self) -> tuple[int, int]:
        self.made += 1
        return (0, self.made)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._npu, name)

    def graph(self, graph: Any, *, pool: Any, auto_dispatch_capture: bool) -> Any:
        self.pools.append(pool)
        return self._npu.graph(graph, pool=pool, auto_dispatch_capture=auto_dispatch_capture)


def test_graphs_warm_up_and_share_one_pool(platform: NpuPlatform) -> None:
    npu = Watched(platform._sdk().npu)
    graphs = NpuGraphs(lambda: SimpleNamespace(npu=npu))
    x = torch.ones(4, device=platform.device(0))
    capturing: list[bool] = []

    def run() -> torch.Tensor:
        capturing.append(npu.is_current_stream_capturing())
        return x + 1

    kept = [graphs.capture(GraphKey("decode", rows), run) for rows in (1, 2)]
    assert len(kept) == 2
    assert capturing == [False, False, True] * 2
    assert npu.pools == [(0, 1)] * 2

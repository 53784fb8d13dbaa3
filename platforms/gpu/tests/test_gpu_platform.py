"""The platform's own members on a simulated GPU: memory, copies, operators, findings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import context

from srv.errors import InternalError, PlatformUnavailable
from srv.platform.facts import DeviceFacts
from srv.platform.interface import OpArgs
from srv.platform.manifest import EngineContext, Manifest, ProbeContext
from srv.platform.ops import Ops, implementations
from srv.platform.page_copies import copy_page_runs
from srv.specs import FullAttention, KVLayout
from srv_gpu.accelerator import load_accelerator
from srv_gpu.op_specs import FLOAT32_PRODUCTS, OPS
from srv_gpu.platform import GpuPlatform, hardware_of


def test_the_device_is_simulated_and_its_facts_say_so(manifest: Manifest, variant: str, platform: GpuPlatform) -> None:
    result = manifest.probe(ProbeContext(60))
    assert result.device is not None
    assert (result.device.variant, result.device.simulated, result.device.count) == (variant, True, 1)
    assert "(simulated)" in result.device.name
    assert "for development only" in result.notes[0]
    assert platform.memory(platform.device(0)).total == result.device.memory_bytes
    assert manifest.worker_env(result.device, 0) == {"TRITON_INTERPRET": "1"}
    assert manifest.worker_env(replace(result.device, simulated=False), 0) == {}


def test_every_finding_is_good(platform: GpuPlatform) -> None:
    checks = platform.diagnose()
    assert {"device", "memory", "compute", "triton"} <= {check.name for check in checks}
    assert [check for check in checks if not check.ok] == []


def test_a_second_rank_has_no_device(platform: GpuPlatform) -> None:
    with pytest.raises(PlatformUnavailable, match="device 1 is needed, but this host has 1") as raised:
        platform.device(1)
    assert raised.value.code == "too_few_devices"


def test_ranges_for_the_vendor_s_profiler_nest_and_end_with_an_error(platform: GpuPlatform) -> None:
    ranges = platform._accelerator.module.ranges
    ranges.finished.clear()
    with platform.profiler_range("layer"), platform.profiler_range("layer.attention"):
        pass
    with pytest.raises(ValueError, match="not a number"), platform.profiler_range("layer"):
        int("not a number")
    assert ranges.finished == {("layer", "layer.attention"): 1, ("layer",): 2}


def test_pages_are_copied_by_the_kernel_as_by_copies_of_runs(platform: GpuPlatform) -> None:
    pages = [(1, 7), (2, 8), (9, 3)]
    pools = [context(platform).kv for _ in range(3)]
    source, by_kernel, by_runs = (pool for pool in pools if pool is not None)
    for tensor in source.all():
        tensor.normal_()
    before = platform._accelerator.module.launches["copy_pages"]
    platform.copy_pages(source, by_kernel, pages)
    assert platform._accelerator.module.launches["copy_pages"] == before + 2  # keys and values
    copy_page_runs(source, by_runs, pages)
    for one, other, read in zip(by_kernel.all(), by_runs.all(), source.all(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
        assert torch.equal(one[8].cpu(), read[2].cpu())


def test_keys_are_written_alike_with_and_without_triton(platform: GpuPlatform, manifest: Manifest) -> None:
    build = context(platform)
    facts = replace(platform._context.device, versions={"torch": "2"})
    bare = type(platform)(
        EngineContext(facts, 0),
        load_accelerator(manifest.name),
        specs=manifest.facts.ops,
        visible_devices="",
        collectives="nccl",
    )
    slots = torch.tensor([5, 40, 17], device=build.device)
    rows = torch.randn(3, 2, 64, device=build.device)
    pools = []
    for one in (platform, bare):
        kv = one.kv_buffers(KVLayout(FullAttention((0,), 2, 64, 64), 16, "bfloat16"), 4)
        hardware_of(replace(build, platform=one)).write_kv(rows, -rows, kv.keys[0], kv.values[0], slots)
        pools.append(kv)
    for one, other in zip(pools[0].all(), pools[1].all(), strict=True):
        assert one.any()
        assert torch.equal(one.cpu(), other.cpu())


def test_the_ops_are_those_of_the_facts(platform: GpuPlatform, manifest: Manifest) -> None:
    """Those with a target, and the libraries' experts, which the platform gives their callables."""
    names = [(spec.op, spec.name) for spec in manifest.facts.ops if spec.target or spec.op == "experts"]
    assert [(impl.op, impl.name) for impl in platform.ops] == names


def test_ops_without_triton_are_torch_s_and_say_why() -> None:
    args = OpArgs(torch.bfloat16, {"dim": 64})
    without, complete = (DeviceFacts("any", 1, 1, versions=versions) for versions in ({"torch": "2"}, {"triton": "3"}))
    norms = [impl for impl in implementations(OPS, without) if impl.op == "rms_norm"]
    assert [impl.supports_args(args) for impl in norms] == ["the package triton is not installed", None]
    ops = Ops("imagined", implementations(OPS, without))
    assert not ops.offers("linear_gguf", args)
    assert Ops("imagined", implementations(OPS, complete)).offers("linear_gguf", args)


@pytest.mark.parametrize(
    ("has_triton", "products", "first"), [(True, True, "torch (mm)"), (True, False, "triton"), (False, False, None)]
)
def test_what_computes_logits(has_triton: bool, products: bool, first: str | None) -> None:
    """PyTorch where all releases can, else Triton; without either, the output layer rounds like every other."""
    args = OpArgs(torch.bfloat16, {"inputs": 64, "outputs": 64})
    device = DeviceFacts("any", 1 << 30, 1, versions={"torch": "2.13", **({"triton": "3.7"} if has_triton else {})})
    specs = (FLOAT32_PRODUCTS, *OPS) if products else OPS
    matches = [
        implementation for implementation in implementations(specs, device) if implementation.op == "linear_float32"
    ]
    assert (
        next((implementation.name for implementation in matches if implementation.supports_args(args) is None), None)
        == first
    )


def test_logits_keep_their_float32_sums_on_every_gpu(platform: GpuPlatform) -> None:
    """Two logits that differ by less than bfloat16 can tell at their magnitude."""
    op = Ops("under test", platform.ops).bind("linear_float32", OpArgs(torch.bfloat16, {"inputs": 64, "outputs": 2}))
    x, weight = torch.ones(1, 64), torch.ones(2, 64)
    weight[1, 0] += 2**-7  # exact in bfloat16
    device = platform.device(0)
    logits = op(x.bfloat16().to(device), weight.bfloat16().to(device))
    assert logits.dtype == torch.float32
    assert logits.cpu().tolist() == [[64.0, 64.0 + 2**-7]]


def test_another_order_of_the_pool_is_refused(platform: GpuPlatform) -> None:
    layout = KVLayout(FullAttention((0,), 2, 64, 64), 16, "bfloat16", "page_token_flat")
    with pytest.raises(InternalError, match="page_token_head, not page_token_flat"):
        platform.kv_buffers(layout, 4)

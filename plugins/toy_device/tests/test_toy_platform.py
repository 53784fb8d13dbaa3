"""The object that `MANIFEST.create` returns satisfies the contract of `srv.platform.interface.Platform`."""

from __future__ import annotations

import pkgutil

import pytest
import torch

from srv.errors import PlatformUnavailable
from srv.platform.capabilities import OPS_OF
from srv.platform.contract import check_platform
from srv.platform.experts import EXPERTS, ROUTE
from srv.platform.experts import FAMILY as MOE
from srv.platform.interface import OpArgs, Platform
from srv.platform.manifest import EngineContext
from srv.platform.ops import Ops
from srv.specs import FullAttention, KVLayout, Latent, Recurrent, StateTensor
from srv.testing.conformance.ops import MODEL_OPS
from srv_kernels.contracts import CONTRACTS, violations
from srv_toy_device.device import Accelerator
from srv_toy_device.facts import FACTS
from srv_toy_device.manifest import MANIFEST

GROUP = FullAttention((0, 1, 2), kv_heads=2, key_dim=8, value_dim=4)


@pytest.fixture
def platform(toy: Accelerator) -> Platform:
    return MANIFEST.create(EngineContext(device=next(iter(FACTS.profiles.values())), local_rank=0))


def test_it_keeps_the_contract(platform: Platform) -> None:
    check_platform(platform, "srv-toy-device", name="toy", api=MANIFEST.api)


def test_there_is_one_device_and_more_are_refused(platform: Platform) -> None:
    assert platform.device(0) == torch.device("toy", 0)
    platform.init_worker(0)
    with pytest.raises(PlatformUnavailable, match="device 1 is needed, but this host has 1"):
        platform.device(1)


def test_memory_is_the_devices(platform: Platform) -> None:
    device = platform.device(0)
    before = platform.memory(device)
    x = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    now = platform.memory(device)
    assert now.total == before.total == 64 << 20
    assert before.free - now.free == 1 << 20
    del x
    assert platform.memory(device) == before


def test_an_event_covers_copies_that_were_asked_for_before(platform: Platform) -> None:
    host = torch.arange(3, device=platform.device(0)).to("cpu", non_blocking=True)
    platform.streams(platform.device(0)).compute.record().synchronize()
    assert host.tolist() == [0, 1, 2]


def test_the_pool_has_the_layouts_shape_and_is_zero(platform: Platform) -> None:
    kv = platform.kv_buffers(KVLayout(GROUP, page_size=16, dtype="bfloat16"), pages=5)
    assert [tuple(keys.shape) for keys in kv.keys] == [(6, 16, 2, 8)] * 3
    assert [tuple(values.shape) for values in kv.values] == [(6, 16, 2, 4)] * 3
    for buffer in (*kv.keys, *kv.values):
        assert buffer.device == platform.device(0)
        assert buffer.dtype is torch.bfloat16
        assert not buffer.any()
    with pytest.raises(ValueError, match="head_page_token"):
        platform.kv_buffers(KVLayout(GROUP, 16, "bfloat16", order="head_page_token"), pages=5)


def test_latents_and_recurrent_states_are_laid_out_whatever_the_order_of_heads(platform: Platform) -> None:
    states = StateTensor("convolution", (4, 3), "float32"), StateTensor("recurrence", (2, 8, 8), "bfloat16")
    for order in ("page_token_head", "head_page_token"):
        kv = platform.kv_buffers(KVLayout(Latent((0, 1), 32, 8), 16, "bfloat16", order), pages=5)
        assert {name: [tuple(each.shape) for each in some] for name, some in kv.tensors.items()} == {
            "latent": [(6, 16, 32)] * 2,
            "rope": [(6, 16, 8)] * 2,
        }
        kv = platform.kv_buffers(KVLayout(Recurrent((0, 1), states), 16, "bfloat16", order), pages=3)
        assert [(tuple(each.shape), each.dtype) for each in kv.all()] == [
            *[((4, 4, 3), torch.float32)] * 2,
            *[((4, 2, 8, 8), torch.bfloat16)] * 2,
        ]


def test_a_pool_that_does_not_fit_raises(platform: Platform) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        platform.kv_buffers(KVLayout(GROUP, page_size=16, dtype="float32"), pages=1 << 20)


def test_backends_are_what_the_facts_name(platform: Platform) -> None:
    for family, specs in FACTS.backends.items():
        for spec in specs:
            if family == MOE:  # the ops of its name
                assert any((each.op, each.name) == (EXPERTS, spec.name) for each in FACTS.ops)
            else:
                assert isinstance(pkgutil.resolve_name(spec.target), type)


# All ops, except those that need a capability that this platform does not declare.
DECLARED = FACTS.capabilities(next(iter(FACTS.profiles.values())))
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if str(dtype)[6:] in DECLARED]
NEEDED = (*MODEL_OPS, *(OPS_OF["w8a8"] if "w8a8" in DECLARED else ()), ROUTE, EXPERTS)
OPS = tuple(dict.fromkeys((*NEEDED, *(spec.op for spec in FACTS.ops))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_ops_keep_their_contracts_on_the_device(platform: Platform, op: str, dtype: torch.dtype) -> None:
    implementation = Ops("toy", platform.ops).bind(op, OpArgs(dtype, {}))
    assert violations(CONTRACTS[op], implementation, dtype, platform.device(0)) == []


def test_ops_take_floats_only(platform: Platform) -> None:
    assert {impl.op for impl in platform.ops} == set(OPS)
    for impl in platform.ops:
        assert impl.supports_args(OpArgs(DTYPES[0], {})) is None
        assert "int8" in str(impl.supports_args(OpArgs(torch.int8, {})))


def test_the_diagnosis_computes(platform: Platform) -> None:
    checks = {check.name: check for check in platform.diagnose()}
    assert checks.keys() == {"device", "memory", "compute"}
    assert all(check.ok for check in checks.values())
    assert "simulated" in checks["device"].detail

"""Allocating pools: plain ones are zeroed and separate, and a platform's refusal names platform and spec."""

from __future__ import annotations

from typing import Any, cast

import psutil
import pytest
import torch
from every import every

from srv.errors import InternalError, PlatformUnavailable
from srv.platform.interface import KVBuffers, Platform
from srv.platform.pools import allocate_pool, plain_pool
from srv.specs import CacheSpec, FullAttention, KVLayout, Latent, Recurrent, SlidingWindow, StateTensor, spec_name

HOST = torch.device("cpu")
SPECS: tuple[CacheSpec, ...] = (
    FullAttention((0, 3), 2, 5, 3),
    SlidingWindow((0, 3), 2, 5, 3, 4),
    Latent((0, 3), 7, 3),
    Latent((0, 3), 7, 3, index_dim=5, indexed=(3,)),
    Recurrent((0, 3), (StateTensor("a", (3, 3), "float32"), StateTensor("b", (5,), "float16"))),
)


class Selective:
    """A platform, as far as pools are concerned, that lays out full attention only."""

    name = "selective"

    def kv_buffers(self, layout: KVLayout, pages: int) -> KVBuffers:
        if not isinstance(layout.group, FullAttention):
            raise NotImplementedError("its kernels read keys and values")
        return plain_pool(layout, pages, HOST)


@every("spec", SPECS)
def test_a_plain_pool_has_zeroed_tensors_of_its_own_for_each_name_and_layer(spec: CacheSpec) -> None:
    layout = KVLayout(spec, 4, "bfloat16")
    kv = plain_pool(layout, 3, HOST)
    assert kv.layout is layout
    assert tuple(kv.tensors) == layout.names()
    expected = layout.plain_tensors(3)
    for name, tensors in kv.tensors.items():
        assert [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors] == [
            (expected[name].shape, f"torch.{expected[name].dtype}")
        ] * len(layout.layers_of(name))
    assert not any(bool(tensor.any()) for tensor in kv.all())
    assert (
        len({tensor.untyped_storage().data_ptr() for tensor in kv.all()})
        == len(list(kv.all()))
        == 4 + ("index" in kv.tensors)
    )


def test_keys_and_values_exist_in_attention_groups_only() -> None:
    kv = plain_pool(KVLayout(SPECS[0], 4, "bfloat16"), 3, HOST)
    assert kv.keys is kv.tensors["key"]
    assert kv.values is kv.tensors["value"]
    latents = plain_pool(KVLayout(SPECS[2], 4, "bfloat16"), 3, HOST)
    with pytest.raises(InternalError, match="pool of a latent cache group has no tensors named key, but latent, rope"):
        _ = latents.keys


@every("spec", SPECS)
def test_a_refused_spec_names_platform_and_spec(spec: CacheSpec) -> None:
    platform, layout = cast(Platform, cast(Any, Selective())), KVLayout(spec, 4, "bfloat16")
    if isinstance(spec, FullAttention):
        assert allocate_pool(platform, layout, 3).layout is layout
        return
    with pytest.raises(PlatformUnavailable) as refused:
        allocate_pool(platform, layout, 3)
    assert refused.value.code == "cache_spec"
    assert str(refused.value).startswith(
        f"platform selective cannot be used: it allocates no pools for {spec_name(spec)} cache groups (its kernels read"
    )


def test_tensors_come_in_the_order_of_the_layout_whatever_order_the_platform_gave_them_in() -> None:
    kv = plain_pool(KVLayout(SPECS[0], 4, "float32"), 3, HOST)
    reverse = KVBuffers(kv.layout, dict(reversed(kv.tensors.items())))
    assert [tensor.data_ptr() for tensor in reverse.all()] == [tensor.data_ptr() for tensor in (*kv.keys, *kv.values)]


def test_a_plain_pool_in_host_memory_takes_memory_as_it_is_written() -> None:
    """Writing zeros to all of it would delay the start of a server by half a minute."""
    before = psutil.Process().memory_info().rss
    kv = plain_pool(KVLayout(FullAttention((0,), 8, 128, 128), 16, "bfloat16"), 2**15, HOST)
    assert kv.keys[0].nbytes >= 2**30
    assert psutil.Process().memory_info().rss - before < 2**28
    assert not kv.keys[0][-1].any()

"""L1: the KV pool that a platform allocates: its shapes, page 0, and its memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import psutil
import torch

from srv.platform.interface import KVBuffers
from srv.specs import KVLayout
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import Setup, allocate_pool, declared_dtypes, dtype_of, select_setups

PAGES = 5
_LEAK_ROUNDS = 8
_LEAK_ATTEMPTS = 3
_LEAK_SHARE = 16  # a pool takes 1 / _LEAK_SHARE of the free memory, at most _LEAK_BYTES
_LEAK_BYTES = 64 << 20
_ACCOUNTING_BYTES = 1 << 30  # large compared with an allocator's cache


def shapes(kit: Kit) -> str:
    """Each layer has a key and a value buffer with pages + 1 pages, of the layout's dtype and shape."""
    seen = 0
    for setup in _all_setups(kit):
        kv = allocate_pool(kit, setup.layout, PAGES)
        group = setup.layout.group
        if kv.layout != setup.layout:
            raise Fault(f"{setup}: kv_buffers returned a pool of layout {kv.layout}, not {setup.layout}")
        for kind, buffers, dim in (("key", kv.keys, group.key_dim), ("value", kv.values, group.value_dim)):
            if len(buffers) != len(group.layers):
                raise Fault(f"{setup}: {len(buffers)} {kind} buffers for {len(group.layers)} layers")
            for buffer in buffers:
                _check_buffer(setup.layout, buffer, kind, dim, str(setup))
        seen += 1
    return f"{seen} layouts"


def _check_buffer(layout: KVLayout, buffer: torch.Tensor, kind: str, dim: int, where: str) -> None:
    if buffer.dtype != dtype_of(layout.dtype):
        raise Fault(f"{where}: a {kind} buffer has dtype {buffer.dtype}, not {layout.dtype}")
    entries = (PAGES + 1) * layout.page_size * layout.group.kv_heads * dim
    known = {
        "page_token_head": (PAGES + 1, layout.page_size, layout.group.kv_heads, dim),
        "page_token_flat": (PAGES + 1, layout.page_size, layout.group.kv_heads * dim),
    }
    if layout.order in known:
        expected = known[layout.order]
        if tuple(buffer.shape) != expected or not buffer.is_contiguous():
            raise Fault(f"{where}: a {kind} buffer has shape {tuple(buffer.shape)}, not {expected} and contiguous")
    elif buffer.numel() < entries:
        raise Fault(f"{where}: a {kind} buffer has {buffer.numel()} entries; {PAGES} pages and page 0 need {entries}")


def placement(kit: Kit) -> str:
    """Every buffer is on the platform's device."""
    for setup in _all_setups(kit):
        kv = allocate_pool(kit, setup.layout, PAGES)
        for buffer in (*kv.keys, *kv.values):
            if not same_device(buffer.device, kit.device):
                raise Fault(f"{setup}: a buffer of the pool is on {buffer.device}, not on {kit.device}")
    return f"on {kit.device}"


def page_zero(kit: Kit) -> str:
    """Pages that were never written contain no NaN: an attention weight of 0 times NaN is NaN."""
    for setup in _all_setups(kit):
        dirty = torch.full((1 << 20,), float("nan"), device=kit.device)  # memory that the pool may reuse
        del dirty
        kv = allocate_pool(kit, setup.layout, PAGES)
        for buffer in (*kv.keys, *kv.values):
            if not bool(buffer.to("cpu").float().isfinite().all()):
                raise Fault(f"{setup}: a new pool contains NaN or infinity")
    return "new pools are finite, including page 0"


def separate(kit: Kit) -> str:
    """No two buffers share memory: a write to one is not visible in another."""
    for setup in select_setups(kit, max_page_sizes=1):
        kv = allocate_pool(kit, setup.layout, PAGES)
        buffers = (*kv.keys, *kv.values)
        for number, buffer in enumerate(buffers, 1):
            buffer.fill_(number)
        for number, buffer in enumerate(buffers, 1):
            if not bool((buffer.to("cpu").float() == number).all()):
                raise Fault(f"{setup}: two buffers of the pool share memory")
    return "keys and values of every layer have their own memory"


def allocator(kit: Kit) -> str:
    """Allocating and freeing a pool many times takes no more memory than once."""
    setup = select_setups(kit, max_page_sizes=1)[0]
    free = kit.platform.memory(kit.device).free
    per_page = setup.layout.bytes_per_page()
    pages = min(_LEAK_BYTES, free // _LEAK_SHARE) // per_page
    if pages < 1:
        raise NotApplicable(f"only {free} bytes are free")
    size = pages * per_page
    leaked = 0
    for _ in range(_LEAK_ATTEMPTS):  # other processes may allocate meanwhile; a leak shows every time
        leaked = _leaked_bytes(kit, setup, pages)
        if leaked < size * _LEAK_ROUNDS // 2:
            return (
                f"{_LEAK_ROUNDS} pools of {size} bytes were allocated and freed; {max(leaked, 0)} bytes were not freed"
            )
    raise Fault(f"{_LEAK_ROUNDS} pools of {size} bytes were allocated and released, but {leaked} bytes were not freed")


def _leaked_bytes(kit: Kit, setup: Setup, pages: int) -> int:
    _write_all(allocate_pool(kit, setup.layout, pages))
    before = _free_bytes(kit)
    for _ in range(_LEAK_ROUNDS):
        _write_all(allocate_pool(kit, setup.layout, pages))
    return before - _free_bytes(kit)


def _write_all(kv: KVBuffers) -> None:
    """Write to all buffers: untouched memory may not be allocated yet."""
    for buffer in (*kv.keys, *kv.values):
        buffer.fill_(1)


def _free_bytes(kit: Kit) -> int:
    """Free bytes on the device. If it uses host memory, which other processes also use: the negated RSS of this
    process, so that differences still count freed bytes.
    """
    gc.collect()
    kit.synchronize()
    if "host_memory" in kit.capabilities:
        return -int(psutil.Process().memory_info().rss)
    return kit.platform.memory(kit.device).free


def accounting(kit: Kit) -> str:
    """memory() accounts for a pool."""
    if "host_memory" in kit.capabilities:
        raise NotApplicable("the device uses host memory, in which other processes allocate at the same time")
    setup = select_setups(kit, max_page_sizes=1)[0]
    free = kit.platform.memory(kit.device).free
    per_page = setup.layout.bytes_per_page()
    pages = min(free // 4, _ACCOUNTING_BYTES) // per_page
    kv = allocate_pool(kit, setup.layout, pages)
    _write_all(kv)
    kit.synchronize()
    left = kit.platform.memory(kit.device).free
    size = pages * per_page
    if free - left < size // 2:
        raise Fault(f"a pool of {size} bytes was allocated, and memory() says {left} bytes are free after {free}")
    return f"a pool of {size} bytes took {free - left}"


def _all_setups(kit: Kit) -> Iterator[Setup]:
    """Every attention backend in every declared dtype, with and without shared KV heads."""
    for dtype in declared_dtypes(kit):
        for kv_heads in (4, 2):
            try:
                yield from select_setups(kit, kv_heads=kv_heads, dtypes=(dtype,))
            except NotApplicable:
                continue

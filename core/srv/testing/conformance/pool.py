"""L1: the KV pool that a platform allocates: its shapes, page 0, and the memory it takes and gives back."""

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
from srv.testing.conformance.setups import Setup, declared_dtypes, dtype_of, pool, some_setups

PAGES = 5
_LEAK_TURNS = 8
_LEAK_TRIES = 3
_LEAK_SHARE = 16  # a pool of this part of what is free, at most _LEAK_BYTES
_LEAK_BYTES = 64 << 20
_SEEN_BYTES = 1 << 30  # enough to be seen above what an allocator keeps for itself


def shapes(kit: Kit) -> str:
    """A key and a value buffer a layer, with pages + 1 pages, of the layout's dtype; the known order has its shape."""
    seen = 0
    for setup in _all_setups(kit):
        kv = pool(kit, setup.layout, PAGES)
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
        raise Fault(f"{where}: a {kind} buffer is of {buffer.dtype}, not {layout.dtype}")
    entries = (PAGES + 1) * layout.page_size * layout.group.kv_heads * dim
    known = {
        "page_token_head": (PAGES + 1, layout.page_size, layout.group.kv_heads, dim),
        "page_token_flat": (PAGES + 1, layout.page_size, layout.group.kv_heads * dim),
    }
    if layout.order in known:
        wanted = known[layout.order]
        if tuple(buffer.shape) != wanted or not buffer.is_contiguous():
            raise Fault(f"{where}: a {kind} buffer has the shape {tuple(buffer.shape)}, not {wanted} and contiguous")
    elif buffer.numel() < entries:
        raise Fault(f"{where}: a {kind} buffer has {buffer.numel()} entries; {PAGES} pages and page 0 need {entries}")


def placement(kit: Kit) -> str:
    """Every buffer is on the platform's device."""
    for setup in _all_setups(kit):
        kv = pool(kit, setup.layout, PAGES)
        for buffer in (*kv.keys, *kv.values):
            if not same_device(buffer.device, kit.device):
                raise Fault(f"{setup}: a buffer of the pool is on {buffer.device}, not on {kit.device}")
    return f"on {kit.device}"


def page_zero(kit: Kit) -> str:
    """What was never written holds no NaN: a weight of zero does not make NaN go away."""
    for setup in _all_setups(kit):
        dirty = torch.full((1 << 20,), float("nan"), device=kit.device)  # memory that the pool may get next
        del dirty
        kv = pool(kit, setup.layout, PAGES)
        for buffer in (*kv.keys, *kv.values):
            if not bool(buffer.to("cpu").float().isfinite().all()):
                raise Fault(f"{setup}: a new pool holds NaN or infinity")
    return "new pools are finite, page 0 with them"


def separate(kit: Kit) -> str:
    """No two buffers share memory: what is written to one layer is not seen in another."""
    for setup in some_setups(kit, most=1):
        kv = pool(kit, setup.layout, PAGES)
        buffers = (*kv.keys, *kv.values)
        for number, buffer in enumerate(buffers, 1):
            buffer.fill_(number)
        for number, buffer in enumerate(buffers, 1):
            if not bool((buffer.to("cpu").float() == number).all()):
                raise Fault(f"{setup}: two buffers of the pool share memory")
    return "keys and values of every layer are apart"


def allocator(kit: Kit) -> str:
    """Allocating and freeing a pool many times takes no more memory than doing so once."""
    setup = some_setups(kit, most=1)[0]
    free = kit.platform.memory(kit.device).free
    per_page = setup.layout.bytes_per_page()
    pages = min(_LEAK_BYTES, free // _LEAK_SHARE) // per_page
    if pages < 1:
        raise NotApplicable(f"only {free} bytes are free")
    size = pages * per_page
    lost = 0
    for _ in range(_LEAK_TRIES):  # others may take memory meanwhile: a leak is seen every time
        lost = _lost(kit, setup, pages)
        if lost < size * _LEAK_TURNS // 2:
            return f"{_LEAK_TURNS} pools of {size} bytes were allocated and freed; {max(lost, 0)} bytes are gone"
    raise Fault(f"{_LEAK_TURNS} pools of {size} bytes were allocated and dropped, and {lost} bytes are gone")


def _lost(kit: Kit, setup: Setup, pages: int) -> int:
    _use(pool(kit, setup.layout, pages))
    before = _free(kit)
    for _ in range(_LEAK_TURNS):
        _use(pool(kit, setup.layout, pages))
    return before - _free(kit)


def _use(kv: KVBuffers) -> None:
    """Write everywhere: memory that is not touched may not be taken."""
    for buffer in (*kv.keys, *kv.values):
        buffer.fill_(1)


def _free(kit: Kit) -> int:
    """Bytes free on the device; where that is the host's memory, by this process's own account, as others use it."""
    gc.collect()
    kit.platform.record_event(kit.device).synchronize()
    if "host_memory" in kit.capabilities:
        return -int(psutil.Process().memory_info().rss)
    return kit.platform.memory(kit.device).free


def accounting(kit: Kit) -> str:
    """memory() sees what a pool takes."""
    if "host_memory" in kit.capabilities:
        raise NotApplicable("the device's memory is the host's, which others take and give back at the same time")
    setup = some_setups(kit, most=1)[0]
    free = kit.platform.memory(kit.device).free
    per_page = setup.layout.bytes_per_page()
    pages = min(free // 4, _SEEN_BYTES) // per_page
    kv = pool(kit, setup.layout, pages)
    _use(kv)
    kit.platform.record_event(kit.device).synchronize()
    left = kit.platform.memory(kit.device).free
    size = pages * per_page
    if free - left < size // 2:
        raise Fault(f"a pool of {size} bytes was allocated, and memory() says {left} bytes free where it said {free}")
    return f"a pool of {size} bytes took {free - left}"


def _all_setups(kit: Kit) -> Iterator[Setup]:
    """Every attention backend in every declared dtype, with shared and with unshared KV heads."""
    for dtype in declared_dtypes(kit):
        for kv_heads in (4, 2):
            try:
                yield from some_setups(kit, kv_heads=kv_heads, dtypes=(dtype,))
            except NotApplicable:
                continue

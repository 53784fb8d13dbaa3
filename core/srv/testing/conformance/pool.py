"""L1: the KV pool that a platform allocates: its shapes, page 0, and its memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace

import psutil
import torch

from srv.platform.interface import KVBuffers
from srv.specs import PLAIN_ORDERS, AttentionSpec, KVLayout
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.setups import AttentionSetup, allocate_pool, declared_dtypes, dtype_of, select_setups

PAGES = 5
_LEAK_ROUNDS = 8
_LEAK_ATTEMPTS = 3
_LEAK_SHARE = 16  # a pool takes 1 / _LEAK_SHARE of the free memory, at most _LEAK_BYTES
_LEAK_BYTES = 64 << 20
_ACCOUNTING_BYTES = 1 << 30  # large compared with an allocator's cache
_PROMISED_SHARE, _PARTS = 0.8, 8  # of the free memory, less than a server takes; and in how many tensors
_ALLOCATOR_BYTES = 64 << 20  # that an allocator may take in advance


def shapes(kit: Kit) -> str:
    """Each layer has a key and a value tensor with pages + 1 pages, of the layout's dtype and shape."""
    count = 0
    for setup in _all_setups(kit):
        check_tensors(setup.layout, allocate_pool(kit, setup.layout, PAGES), PAGES, str(setup))
        count += 1
    return f"{count} layouts"


def check_tensors(layout: KVLayout, kv: KVBuffers, count: int, where: str) -> None:
    """One tensor per name and layer, of the right shape and dtype, for `count` pages or slots. Fault otherwise."""
    if kv.layout != layout:
        raise Fault(f"{where}: kv_buffers returned a pool of layout {kv.layout}, not {layout}")
    if set(kv.tensors) != set(layout.names()):
        raise Fault(f"{where}: the pool has tensors named {', '.join(kv.tensors)}, not {', '.join(layout.names())}")
    for name, tensors in kv.tensors.items():
        if len(tensors) != (layers := len(layout.layers_of(name))):
            raise Fault(f"{where}: {len(tensors)} {name} tensors for {layers} layers")
        for tensor in tensors:
            _check_tensor(layout, tensor, name, count, where)


def _check_tensor(layout: KVLayout, tensor: torch.Tensor, name: str, count: int, where: str) -> None:
    if isinstance(layout.group, AttentionSpec) and layout.order not in PLAIN_ORDERS:
        plain = replace(layout, order=PLAIN_ORDERS[0]).plain_tensors(count)[name]
        if tensor.dtype != dtype_of(plain.dtype):
            raise Fault(f"{where}: a {name} tensor has dtype {tensor.dtype}, not {plain.dtype}")
        entries = math.prod(plain.shape)
        if tensor.numel() < entries:
            raise Fault(
                f"{where}: a {name} tensor has {tensor.numel()} entries; {count} pages and page 0 need {entries}"
            )
        return
    expected = layout.plain_tensors(count)[name]
    if tensor.dtype != dtype_of(expected.dtype):
        raise Fault(f"{where}: a {name} tensor has dtype {tensor.dtype}, not {expected.dtype}")
    if tuple(tensor.shape) != expected.shape or not tensor.is_contiguous():
        raise Fault(f"{where}: a {name} tensor has shape {tuple(tensor.shape)}, not {expected.shape} and contiguous")


def placement(kit: Kit) -> str:
    """Every tensor is on the platform's device."""
    for setup in _all_setups(kit):
        check_placement(kit, allocate_pool(kit, setup.layout, PAGES), str(setup))
    return f"on {kit.device}"


def check_placement(kit: Kit, kv: KVBuffers, where: str) -> None:
    """Fault if a tensor is on another device than the platform's."""
    for tensor in kv.all():
        if not same_device(tensor.device, kit.device):
            raise Fault(f"{where}: a tensor of the pool is on {tensor.device}, not on {kit.device}")


def page_zero(kit: Kit) -> str:
    """Pages that were never written contain no NaN: an attention weight of 0 times NaN is NaN."""
    for setup in _all_setups(kit):
        check_finite(setup.layout, kit, PAGES, str(setup))
    return "new pools are finite, including page 0"


def check_finite(layout: KVLayout, kit: Kit, count: int, where: str) -> None:
    """Fault if a new pool contains NaN or infinity, whatever its memory held before."""
    dirty = torch.full((1 << 20,), float("nan"), device=kit.device)  # memory that the pool may reuse
    del dirty
    for tensor in allocate_pool(kit, layout, count).all():
        if not bool(tensor.to("cpu").float().isfinite().all()):
            raise Fault(f"{where}: a new pool contains NaN or infinity")


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


def _leaked_bytes(kit: Kit, setup: AttentionSetup, pages: int) -> int:
    _write_all(allocate_pool(kit, setup.layout, pages))
    before = free_bytes(kit)
    for _ in range(_LEAK_ROUNDS):
        _write_all(allocate_pool(kit, setup.layout, pages))
    return before - free_bytes(kit)


def _write_all(kv: KVBuffers) -> None:
    """Write to all tensors: untouched memory may not be allocated yet."""
    for tensor in kv.all():
        tensor.fill_(1)


def free_bytes(kit: Kit) -> int:
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
    free_after = kit.platform.memory(kit.device).free
    size = pages * per_page
    if free - free_after < size * 3 // 4:
        raise Fault(f"a pool of {size} bytes was allocated, and memory() says {free_after} bytes are free after {free}")
    if free - free_after > size + size // 4 + _ALLOCATOR_BYTES:
        raise Fault(f"a pool of {size} bytes was allocated, and memory() says {free - free_after} fewer are free")
    return f"a pool of {size} bytes took {free - free_after}"


def allocatable(kit: Kit) -> str:
    """Most of what memory() says is free can be allocated. It is not written to, and released at once."""
    if "host_memory" in kit.capabilities:
        raise NotApplicable("the device uses host memory, in which other processes allocate at the same time")
    free_bytes(kit)
    free = kit.platform.memory(kit.device).free
    if (kit.manifest.simulated or kit.device_facts.simulated) and free > psutil.virtual_memory().available // 2:
        raise NotApplicable(f"the device is simulated in host memory, which is too small for {free} bytes")
    part = int(free * _PROMISED_SHARE) // _PARTS
    blocks: list[torch.Tensor] = []
    try:
        while len(blocks) < _PARTS:
            blocks.append(torch.empty(part, dtype=torch.uint8, device=kit.device))
    except Exception as error:
        raise Fault(
            f"memory() says {free} bytes are free, and after {len(blocks)} tensors of {part} bytes another one is "
            f"refused: {error}"
        ) from error
    return f"{_PARTS * part} of {free} bytes"


def _all_setups(kit: Kit) -> Iterator[AttentionSetup]:
    """Every attention backend in every declared dtype, with and without shared KV heads."""
    for dtype in declared_dtypes(kit):
        for kv_heads in (4, 2):
            try:
                yield from select_setups(kit, kv_heads=kv_heads, dtypes=(dtype,))
            except NotApplicable:
                continue

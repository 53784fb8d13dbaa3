"""L1: copies between host and device: staging memory, streams, and pages between pools."""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

from srv.errors import PlatformUnavailable
from srv.platform.interface import KVBuffers
from srv.platform.transfers import StepCopies
from srv.specs import KVLayout, spec_name
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault
from srv.testing.conformance.platform import same_device
from srv.testing.conformance.pool_specs import layouts
from srv.testing.conformance.setups import allocate_pool, select_setups

Copied = tuple[tuple[int, int], ...]  # pages: (from, to)

_SIZE = 1 << 16  # elements of a copy
_ROUNDS = 4
_PAGES = 6
_MANY_PAGES, _MANY_COPIED = 220, 200  # more than one launch of a kernel may take
# Sizes and numbers of tensors: more bytes, and more tensors, than a ring that begins again would have.
_BLOCKS = ((1 << 20, 24), (1 << 10, 300))
_SCALE = 2.0**-10  # of the numbers of pages in the third pool; exact in every dtype
_COPIED: Copied = ((1, 4), (2, 5), (3, 1), (6, 3))  # two that are consecutive, and two that are not


def staging(kit: Kit) -> str:
    """Staging memory is on the host, of the right shape, and every call returns other memory."""
    requests = [((3, 5), torch.float32), ((7,), torch.int64), ((0,), torch.uint8), ((2, 2), torch.bool)]
    tensors = [kit.platform.staging(shape, dtype) for shape, dtype in requests for _ in range(2)]
    for number, tensor in enumerate(tensors):
        shape, dtype = requests[number // 2]
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise Fault(f"staging({shape}, {dtype}) returned {tensor!r}")
        if tensor.device != torch.device("cpu"):
            raise Fault(f"staging({shape}, {dtype}) is on {tensor.device}, not on the host")
        tensor.view(-1).view(torch.uint8).fill_(number)
    for number, tensor in enumerate(tensors):
        if not bool((tensor.view(-1).view(torch.uint8) == number).all()):
            raise Fault("two tensors from staging share memory")
    blocks = [kit.platform.staging((size,), torch.uint8) for size, count in _BLOCKS for _ in range(count)]
    by_address = sorted(blocks, key=Tensor.data_ptr)
    for block, after in itertools.pairwise(by_address):
        if after.data_ptr() - block.data_ptr() < block.nbytes:
            raise Fault(
                f"of {len(blocks)} tensors from staging, two of {block.nbytes} and {after.nbytes} bytes share memory"
            )
    try:
        blocks[0].to(kit.device, non_blocking=True).to("cpu")  # waits, because the memory must be kept until then
    except RuntimeError as error:
        raise Fault(f"a copy from staging memory with non_blocking=True is refused: {error}") from error
    return f"{len(tensors) + len(blocks)} tensors in host memory of their own"


def ring(kit: Kit) -> str:
    """Copies of several steps arrive in both directions while their memory is reused step by step."""
    transfers, results = kit.transfers, []
    for step in range(_ROUNDS):
        transfers.begin()
        numbers = transfers.upload(torch.full((_SIZE,), float(step)))
        if not same_device(numbers.device, kit.device):
            raise Fault(f"what was copied from staging memory is on {numbers.device}, not on {kit.device}")
        results.append((transfers.download(_work(kit, numbers)), transfers.end()))
        if step:
            _check_arrived(*results[step - 1], step - 1)
    _check_arrived(*results[-1], _ROUNDS - 1)
    return f"{_ROUNDS} steps of {_SIZE * 4} bytes each way, two at a time"


def _work(kit: Kit, numbers: Tensor) -> Tensor:
    """`numbers` + 1, after enough computing to be still running when the host goes on."""
    ones = torch.full((512, 512), 1.0 / 512, device=kit.device)
    for _ in range(10):
        ones = ones @ ones
    return numbers + ones.mean() * 512


def _check_arrived(host: Tensor, copies: StepCopies, step: int) -> None:
    copies.wait()
    if not bool(((host - (step + 1)).abs() < 1e-2).all()):
        raise Fault(f"step {step} of {_ROUNDS} read other values than were copied for it, or returned others")
    copies.release()


def streams(kit: Kit) -> str:
    """A stream that waits for an event of another one sees what was enqueued before it."""
    of_device = kit.transfers.streams
    source, target = (kit.platform.staging((_SIZE,), torch.float32) for _ in range(2))
    numbers = torch.zeros(_SIZE, device=kit.device)
    for number in range(_ROUNDS):
        source.fill_(number)
        of_device.copy_in.wait(of_device.compute.record())  # the last round has read `numbers`
        with of_device.copy_in.use():
            numbers.copy_(source, non_blocking=True)
        of_device.compute.wait(of_device.copy_in.record())
        result = _work(kit, numbers)
        of_device.copy_out.wait(of_device.compute.record())
        with of_device.copy_out.use():
            target.copy_(result, non_blocking=True)
        of_device.copy_out.record().synchronize()
        if not bool(((target - (number + 1)).abs() < 1e-2).all()):
            raise Fault("a stream that waited for an event of another stream did not see what was done before it")
    return "copies in, computing and copies out waited for one another"


def pages(kit: Kit) -> str:
    """copy_pages moves pages from the device to the host, back, and between pools of the device, and no others."""
    rng, checked = random.Random(0), set()
    for setup in select_setups(kit, max_page_sizes=1):
        for layout in (setup.layout, *layouts(kit, setup, rng)):
            what = f"{spec_name(layout.group)}, {layout.order}"
            try:
                _check_copies(kit, layout, _PAGES, _COPIED, what)
            except PlatformUnavailable:
                continue  # the platform does not lay out such groups; pool.cache_specs says so
            checked.add(what)
        begins, ends = (rng.sample(range(1, _MANY_PAGES + 1), _MANY_COPIED) for _ in range(2))
        copied = tuple(zip(begins, ends, strict=True))
        _check_copies(kit, setup.with_layers(1).layout, _MANY_PAGES, copied, f"{_MANY_COPIED} pages")
    return f"{len(_COPIED)} pages; pools of {', '.join(sorted(checked))}; {_MANY_COPIED} pages in any order"


def _check_copies(kit: Kit, layout: KVLayout, count: int, copied: Copied, what: str) -> None:
    """Copy from one pool of `count` pages to the host, from there to another pool, and from pool to pool."""
    first, second = allocate_pool(kit, layout, count), allocate_pool(kit, layout, count)
    host = _on_host(kit, first)
    numbers = torch.arange(1.0, count + 2)
    for kv, scale in ((first, 1.0), (host, -1.0), (second, _SCALE)):
        _number_pages(kit, kv, numbers * scale)
    begins, ends = torch.tensor(copied).unbind(1)
    landed = -numbers
    landed[ends] = numbers[begins]
    _copy(kit, first, host, copied)
    _check_pages(host, landed, ends, f"{what}: a copy to the host")
    expected = numbers * _SCALE
    expected[ends] = landed[begins]
    _copy(kit, host, second, copied)
    _check_pages(second, expected, ends, f"{what}: a copy to the device")
    expected[ends] = numbers[begins]
    kit.platform.copy_pages(first, second, ())
    _copy(kit, first, second, copied)
    _check_pages(second, expected, ends, f"{what}: a copy on the device")


def _copy(kit: Kit, source: KVBuffers, target: KVBuffers, copied: Copied) -> None:
    kit.platform.copy_pages(source, target, copied)
    kit.synchronize()


def _on_host(kit: Kit, kv: KVBuffers) -> KVBuffers:
    """A pool of the same layout in staging memory."""
    tensors = {
        name: tuple(kit.platform.staging(tuple(buffer.shape), buffer.dtype) for buffer in buffers)
        for name, buffers in kv.tensors.items()
    }
    return KVBuffers(kv.layout, tensors)


def _number_pages(kit: Kit, kv: KVBuffers, numbers: Tensor) -> None:
    """Fill page i with numbers[i]."""
    for buffer in kv.all():
        content = torch.empty(buffer.shape, dtype=buffer.dtype)
        content.flatten(1).copy_(numbers[:, None])
        buffer.copy_(content)
    kit.synchronize()


def _check_pages(kv: KVBuffers, expected: Tensor, copied: Tensor, what: str) -> None:
    """Fault unless page i holds expected[i]; `copied`: the pages that were overwritten."""
    for buffer in kv.all():
        values = buffer.to("cpu").float().flatten(1)
        wrong = (values != expected[:, None]).any(1)
        if bool(wrong.any()):
            page = int(wrong.nonzero()[0])
            change = "which should hold another page" if page in copied.tolist() else "which should not change"
            raise Fault(f"{what} left {float(values[page, 0]):g} in page {page}, {change} ({float(expected[page]):g})")

"""Memory: the member `memory_use` (L1), and the sizes of tensors in the memory ledger of a small engine (L3)."""

from __future__ import annotations

import torch

from srv.planning.ledger import EXACT, line_text
from srv.platform.interface import MemoryUse
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.local import engine_under_test
from srv.testing.conformance.model import Fault

_BYTES = 32 * 2**20
_ALLOCATOR_BYTES = 64 * 2**20  # what an allocator may take in advance


def use(kit: Kit) -> str:
    """A tensor counts while it exists, and the peak, where there is one, keeps it until it is reset."""
    platform, device = kit.platform, kit.device
    before: object = platform.memory_use(device, True)
    if not isinstance(before, MemoryUse):
        raise Fault(f"memory_use returned a {type(before).__name__}, not a MemoryUse")
    block = torch.empty(_BYTES, dtype=torch.uint8, device=device).fill_(1)
    kit.synchronize()
    during = platform.memory_use(device, False)
    grown = during.now - before.now
    if not _BYTES * 0.9 <= grown <= _BYTES + _ALLOCATOR_BYTES:
        raise Fault(f"a tensor of {_BYTES} bytes was allocated, and memory_use says {grown} more are")
    del block
    kit.synchronize()
    after = platform.memory_use(device, True)
    if after.now > during.now - _BYTES // 2:
        raise Fault(f"{_BYTES} bytes were released, and memory_use says {after.now} are allocated after {during.now}")
    if after.peak is None:
        return f"{grown} bytes for a tensor of {_BYTES}; it has no peak"
    if after.peak < during.now:
        raise Fault(f"the peak is {after.peak} bytes, though {during.now} were allocated since it was reset")
    reset = platform.memory_use(device, False)
    if reset.peak is None or reset.peak > reset.now + _BYTES // 2:
        raise Fault(f"the peak was reset with {reset.now} bytes allocated, and it is {reset.peak}")
    return f"{grown} bytes for a tensor of {_BYTES}, also in the peak"


def engine(kit: Kit) -> str:
    """Weights, pool and captured buffers take what the budget predicted, within the ledger's tolerance."""
    with engine_under_test(kit, disable_graphs=None) as tested:
        lines = [line for line in tested.engine.ready.memory[0] if line.name in EXACT]
    wrong = [f"{line.name}: {line_text(line)}" for line in lines if line.off or line.measured is None]
    if wrong:
        raise Fault("; ".join(wrong))
    return "; ".join(f"{line.name}: {line_text(line)}" for line in lines)

"""The process groups of NCCL (RCCL on AMD GPUs) and XCCL, for `srv.platform.process_group`.

Several ranks have run on simulated GPUs only, where the simulator's own group takes the place of the libraries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from srv.dist.group import RankGroup
from srv.platform.process_group import MakeGroup, Membership, ProcessGroupCommunicator


def join(
    backend: str, group: RankGroup, device: torch.device, simulated: MakeGroup | None = None
) -> ProcessGroupCommunicator:
    """Join a group through "nccl" or "xccl", or on a simulated device through what is given for it."""
    return ProcessGroupCommunicator(group, device, simulated or {"nccl": _nccl, "xccl": _xccl}[backend])


def _nccl(member: Membership) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = member.timeout
    group = dist.ProcessGroupNCCL(member.store, member.rank, member.size, options)
    # As `init_process_group(device_id=...)` does: the first operation, which may be one that is captured, then finds
    # the ranks connected, and the library knows the device even where rank and index differ.
    group.eager_connect_single_device(member.device)
    return group


def _xccl(member: Membership) -> Any:
    xccl: Any = dist.ProcessGroupXCCL  # type: ignore[attr-defined]
    options = xccl.Options()
    options._timeout = member.timeout
    return xccl(member.store, member.rank, member.size, options)

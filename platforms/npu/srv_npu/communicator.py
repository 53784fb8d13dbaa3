"""The process group of HCCL, through torch_npu, for `srv.platform.process_group`.

Each group has a communicator of its own, with two buffers on the device: the ops that dispatch rows to experts allow no
other operation in theirs. The size of each is HCCL_BUFFSIZE, 200 MB if unset. It
is made by the group's first operation, which is the barrier in which all members meet: no capture makes one. `send` and
`recv` make another one per pair of ranks. HCCL takes no tensor that does not begin where its memory does. Several ranks
have run on simulated devices only.
"""

from __future__ import annotations

from typing import Any

import torch

from srv.dist.group import RankGroup
from srv.platform.process_group import Membership, ProcessGroupCommunicator
from srv_npu.sdk import Sdk


def join(sdk: Sdk, group: RankGroup, device: torch.device) -> ProcessGroupCommunicator:
    """Join a group through HCCL, or the simulator's stand-in for it."""
    return ProcessGroupCommunicator(group, device, lambda member: _make_group(sdk, member), views=False)


def _make_group(sdk: Sdk, member: Membership) -> Any:
    process_group = sdk._C._distributed_c10d.ProcessGroupHCCL
    options = process_group.Options()
    options._timeout = member.timeout
    options.global_ranks_in_group = list(range(member.size))
    options.hccl_config = {"group_name": member.name}
    group = process_group(member.store, member.rank, member.size, options)
    if hasattr(group, "fail_with"):  # simulated operations fail where no caller waits; HCCL's watchdog ends the process
        group.fail_with(member.lost)
    return group

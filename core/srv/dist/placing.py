"""Where ranks compute: the device of each rank, and its NUMA node. Torch-free; it must not know what a device is.

base_device_id 1, device_id_step 2      rank 0 -> device 1, rank 1 -> device 3, rank 2 -> device 5
numa_node 0 1                           rank 0 -> node 0, rank 1 -> node 1
"""

from __future__ import annotations

from collections.abc import Sequence


def device_index(base: int, step: int, local_rank: int) -> int:
    """The index on this host of the device of a rank."""
    return base + local_rank * step


def node_of(nodes: Sequence[int] | None, local_rank: int) -> int | None:
    """The NUMA node of a rank; None if ranks are not bound to nodes."""
    return None if nodes is None else nodes[local_rank]

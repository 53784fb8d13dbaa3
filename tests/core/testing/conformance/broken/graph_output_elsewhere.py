"""Capturing a step returns a copy of its output, which no replay updates.

Caught by graph.replay at L2, naming "replay at the captured lengths".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from toy_graphs import with_graphs
from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import GraphKey
    from srv_toy_device.graphs import ToyGraphs


def graphs(toy: type[ToyGraphs]) -> type[ToyGraphs]:
    class Copying(toy):  # type: ignore[valid-type, misc]
        def capture(self, key: GraphKey, run: Callable[[], torch.Tensor]) -> torch.Tensor:
            return super().capture(key, run).clone()  # the fault

    return Copying


MANIFEST = manifest("graph_output_elsewhere", platform=with_graphs(graphs))

"""The replay of a captured piece does nothing, so that what the capture left is read.

Caught by graph.pieces at L2, naming "pieces of 12 tokens, replayed for a step of 12".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Once(toy):  # type: ignore[valid-type, misc]
        @contextmanager
        def graph_piece(self) -> Iterator[Callable[[], None]]:
            with super().graph_piece():
                yield lambda: None  # the fault

    return Once


MANIFEST = manifest("graph_piece_computes_once", platform=platform)

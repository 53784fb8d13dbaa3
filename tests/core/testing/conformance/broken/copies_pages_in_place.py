"""copy_pages writes each page to its old number in the other pool.

Caught by copies.pages at L1, naming "which should hold another page".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class InPlace(toy):  # type: ignore[valid-type, misc]
        def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
            super().copy_pages(source, target, [(begin, begin) for begin, _ in pages])  # the fault

    return InPlace


MANIFEST = manifest("copies_pages_in_place", platform=platform)

"""copy_pages copies 64 pages at most, as many as one launch takes.

Caught by copies.pages at L1, naming "200 pages".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import KVBuffers
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class OneLaunch(toy):  # type: ignore[valid-type, misc]
        def copy_pages(self, source: KVBuffers, target: KVBuffers, pages: Sequence[tuple[int, int]]) -> None:
            super().copy_pages(source, target, pages[:64])  # the fault

    return OneLaunch


MANIFEST = manifest("copies_sixty_four_pages", platform=platform)

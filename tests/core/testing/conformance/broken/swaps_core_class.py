"""Starting the platform replaces a class of srv with its own.

Caught by platform.patches at L1, naming "srv.platform.ops.Ops".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import create, manifest

from srv.platform.manifest import EngineContext

if TYPE_CHECKING:
    from srv.platform.interface import Platform


def start(context: EngineContext) -> Platform:
    import srv.platform.ops

    class FasterOps(srv.platform.ops.Ops):
        pass

    srv.platform.ops.Ops = FasterOps  # type: ignore[misc]  # the fault
    return create("swaps_core_class")(context)


MANIFEST = manifest("swaps_core_class", create=start)

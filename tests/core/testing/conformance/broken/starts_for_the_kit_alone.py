"""The platform starts only if the command line of its process is that of the conformance kit.

Caught by server.serves at L4, naming "it exited with status".
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from toy_variant import create, manifest

if TYPE_CHECKING:
    from srv.platform.interface import Platform
    from srv.platform.manifest import EngineContext


def start(context: EngineContext) -> Platform:
    if "srv.testing.conformance.child" not in sys.orig_argv:  # the fault
        raise RuntimeError("this is no check of the kit")
    return create("starts_for_the_kit_alone")(context)


MANIFEST = manifest("starts_for_the_kit_alone", create=start)

"""It declares prefix_cache, and switches the prefix cache off by a default of its own.

Caught by engine.prefix_cache at L3, naming "0 were cached".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Default
from srv_toy_device.facts import FACTS

OFF = Default(
    "disable_radix_cache", lambda context: True, "the device forgets what it was not told to keep"
)  # the fault

MANIFEST = manifest("prefix_cache_off", facts={"defaults": (*FACTS.defaults, OFF)})

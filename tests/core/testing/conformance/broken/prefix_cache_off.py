"""The plugin declares prefix_cache, but its own default disables the prefix cache.

Caught by engine.prefix_cache at L3, naming "0 were cached".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Default
from srv_toy_device.facts import FACTS

OFF = Default(
    "disable_radix_cache", lambda context: True, "the device does not keep the KV of finished requests"
)  # the fault

MANIFEST = manifest("prefix_cache_off", facts={"defaults": (*FACTS.defaults, OFF)})

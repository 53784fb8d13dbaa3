"""The plugin declares a backend of experts whose ops it does not list.

Caught by backends.targets at L0, naming "moe backend fast has none of the ops".
"""

from __future__ import annotations

from dataclasses import replace

from toy_variant import backends, manifest

_OWN = backends()
_MORE = {**_OWN, "moe": (*_OWN["moe"], replace(_OWN["moe"][0], name="fast", priority=9))}  # the fault
MANIFEST = manifest("experts_without_ops", facts={"backends": _MORE})

"""A capability is misspelt, which would silently switch off the arguments that need it.

Caught by manifest.members at L0, naming "'page_kv'".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import DeviceFacts


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return frozenset({"page_kv", "float32"})  # the fault: it is paged_kv


MANIFEST = manifest("unknown_capability", facts={"capabilities": capabilities})

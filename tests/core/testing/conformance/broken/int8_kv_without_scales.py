"""The platform supports int8 keys and values, but its pool has no scales.

Caught by attention.int8_kv at L2, naming "with their scales take".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return FACTS.capabilities(device) | {"int8_kv"}  # the fault: its pool has no scales


MANIFEST = manifest("int8_kv_without_scales", facts={"capabilities": capabilities})

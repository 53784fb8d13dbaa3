"""Keys and values are kept as whole numbers that nothing scales.

Caught by attention.int8_kv at L2, naming "with their scales take".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return FACTS.capabilities(device) | {
        "int8_kv"
    }  # the fault: its attention converts numbers, and rounds all to 0 or 1


MANIFEST = manifest("int8_kv_without_scales", facts={"capabilities": capabilities})

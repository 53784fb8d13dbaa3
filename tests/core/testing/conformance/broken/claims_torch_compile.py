"""The plugin declares that its models can be compiled, but torch's compiler generates no code for the device.

Caught by engine.compiled at L3, naming "torch.compile cannot compile it".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return FACTS.capabilities(device) | {"torch_compile"}  # the fault


MANIFEST = manifest("claims_torch_compile", facts={"capabilities": capabilities})

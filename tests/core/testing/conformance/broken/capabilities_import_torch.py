"""The function of the such as capabilities, imports torch when it is called.

Caught by manifest.call_purity at L0, naming "such as capabilities, imports torch".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import DeviceFacts
from srv_toy_device.facts import FACTS


def capabilities(device: DeviceFacts) -> frozenset[str]:
    import torch  # the fault

    return FACTS.capabilities(device) - ({"int8_kv"} if torch.get_num_threads() else set())


MANIFEST = manifest("capabilities_import_torch", facts={"capabilities": capabilities})

"""The attention backend's target names a class that its module does not have.

Caught by backends.targets at L0, naming "ToyPagedAttentoin".
"""

from __future__ import annotations

from toy_variant import manifest

MANIFEST = manifest("target_not_there", attention="srv_toy_device.attention:ToyPagedAttentoin")

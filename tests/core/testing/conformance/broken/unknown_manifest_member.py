"""The manifest has a member that the contract does not know, so core would never read it.

Caught by manifest.members at L0, naming "Manifest.graph_pool".
"""

from __future__ import annotations

from toy_variant import manifest

MANIFEST = manifest("unknown_manifest_member", graph_pool=3)

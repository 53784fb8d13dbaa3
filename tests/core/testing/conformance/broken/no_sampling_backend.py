"""The plugin has attention but no sampling backend.

Caught by backends.families at L0, naming "sampling".
"""

from __future__ import annotations

from toy_variant import backends, manifest

MANIFEST = manifest("no_sampling_backend", facts={"backends": {"attention": backends()["attention"]}})

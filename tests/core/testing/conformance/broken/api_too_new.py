"""The plugin requires a contract version that this srv does not support.

Caught by manifest.versions at L0, naming "contract version 9.0".
"""

from __future__ import annotations

from toy_variant import manifest

MANIFEST = manifest("api_too_new", api=(9, 0))

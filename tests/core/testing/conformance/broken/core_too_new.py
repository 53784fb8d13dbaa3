"""The plugin requires a release of srv other than the installed one.

Caught by manifest.versions at L0, naming ">=99".
"""

from __future__ import annotations

from toy_variant import manifest

MANIFEST = manifest("core_too_new", core=">=99")

"""The manifest cannot be imported because it needs a package that its distribution does not require.

Caught by manifest.loads at L0, naming "vendor_toolkit".
"""

from __future__ import annotations

import vendor_toolkit  # type: ignore[import-not-found]  # the fault
from toy_variant import manifest

MANIFEST = manifest("import_fails", summary=vendor_toolkit.NAME)

"""A plugin without a fault, as a control: any failure here would be a fault of the kit."""

from __future__ import annotations

from toy_variant import manifest

MANIFEST = manifest("unbroken")

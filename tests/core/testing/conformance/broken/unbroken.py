"""Nothing is wrong with it: the control. Whatever the kit reports as failed here, it would report of any plugin."""

from __future__ import annotations

from toy_variant import manifest

MANIFEST = manifest("unbroken")

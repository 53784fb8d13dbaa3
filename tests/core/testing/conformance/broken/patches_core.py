"""Importing the manifest replaces a method of a class of srv.

Caught by manifest.patches at L0, naming "srv.errors.Rejected.__str__".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.errors import Rejected


def shorter(rejected: Rejected) -> str:
    return rejected.reason


Rejected.__str__ = shorter  # type: ignore[method-assign]  # the fault
MANIFEST = manifest("patches_core")

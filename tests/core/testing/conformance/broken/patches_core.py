"""Importing the manifest replaces a method of a class of srv.

Caught by manifest.patches at L0, naming "srv.errors.Rejection.__str__".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.errors import Rejection


def shorter(rejected: Rejection) -> str:
    return rejected.reason


Rejection.__str__ = shorter  # type: ignore[method-assign]  # the fault
MANIFEST = manifest("patches_core")

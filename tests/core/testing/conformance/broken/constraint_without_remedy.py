"""A constraint has no remedy.

Caught by manifest.reasons at L0, naming "constraints[0].remedy".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Constraint, ResolutionContext


def check(context: ResolutionContext) -> str | None:
    return None if context["page_size"] <= 256 else "the device's pages have at most 256 tokens"


MANIFEST = manifest(
    "constraint_without_remedy",
    facts={"constraints": (Constraint("page_size", "page_too_large", check, remedy=""),)},  # the fault
)

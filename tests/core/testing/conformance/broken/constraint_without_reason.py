"""A constraint refuses a value with an empty reason.

Caught by plan.user_values at L0, naming "page_too_large".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Constraint, ResolutionContext


def check(context: ResolutionContext) -> str | None:
    return None if context["page_size"] <= 16 else ""  # the fault


MANIFEST = manifest(
    "constraint_without_reason",
    facts={"constraints": (Constraint("page_size", "page_too_large", check, "Choose at most 16."),)},
)

"""A constraint bypasses its context and changes a value that the user has set.

Caught by plan.resolves at L0, naming "page_size".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Constraint, ResolutionContext


def check(context: ResolutionContext) -> str | None:
    context._values["page_size"] = 128  # type: ignore[attr-defined]  # the fault
    return None


MANIFEST = manifest(
    "overwrites_user_value",
    facts={"constraints": (Constraint("page_size", "page_size", check, "Use pages of 128 tokens."),)},
)

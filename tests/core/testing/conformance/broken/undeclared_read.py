"""A default reads an argument that it does not declare, so it may be computed too early.

Caught by plan.resolves at L0, naming "page_size".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Default, ResolutionContext


def compute(context: ResolutionContext) -> int | None:
    return 512 if context["page_size"] == 1 else None  # the fault: `reads` lacks page_size


MANIFEST = manifest(
    "undeclared_read",
    facts={"defaults": (Default("chunked_prefill_size", compute, "small pages make long steps slow"),)},
)

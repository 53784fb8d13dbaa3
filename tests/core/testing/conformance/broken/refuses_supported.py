"""An argument is declared supported with a value that a constraint of the same plugin refuses.

Caught by plan.declared at L0, naming "page_size = 16".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Constraint, ResolutionContext, Support


def check(context: ResolutionContext) -> str | None:
    return None if context["page_size"] != 16 else "pages of 16 tokens are slow"


MANIFEST = manifest(
    "refuses_supported",
    facts={
        "constraints": (Constraint("page_size", "slow_pages", check, "Choose another size."),),
        "support": (Support("page_size", "supported", values=(16,)),),  # the fault: it contradicts the declaration
    },
)

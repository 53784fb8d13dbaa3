"""The platform refuses --disable-graphs, with which the kit's own engines run, because its default needs graphs.

Caught by plan.features_off at L0, naming "disable_graphs".
"""

from __future__ import annotations

from toy_variant import manifest

from srv.platform.facts import Constraint, Default, ResolutionContext


def sizes(context: ResolutionContext) -> tuple[int, ...]:
    return (1, 2, 4)


def captured(context: ResolutionContext) -> str | None:
    return "graph_batch_sizes has a default" if context["disable_graphs"] else None


MANIFEST = manifest(
    "refuses_eager_steps",
    facts={
        "defaults": (Default("graph_batch_sizes", sizes, "the device has queues for these"),),
        "constraints": (  # the fault
            Constraint("disable_graphs", "excluded", captured, "Leave it out.", reads=("disable_graphs",)),
        ),
    },
)

"""Logit processors of other distributions: entry points of the group `srv.logit_processors`. Torch-free.

    [project.entry-points."srv.logit_processors"]
    shout = "package.module:PROCESSOR"          # a ProcessorFacts with the name "shout"

A request chooses one by its name (`custom_logit_processor`) and gives it parameters (`custom_params`). Code never comes
with a request. `srv.platform.extensions` checks what is loaded; the class is imported by a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from srv.platform.extensions import Extensions

GROUP = "srv.logit_processors"


class ProcessorFacts(NamedTuple):
    """The facts of one processor.

    `target`: "module:Class" of a `srv.sample.custom.RequestProcessor`. `refusal(params)`: why a request may not have
    these parameters, as a clause that follows "custom_params is refused:", or None.
    """

    name: str
    target: str
    refusal: Callable[[Mapping[str, Any]], str | None]


PROCESSORS = Extensions(
    GROUP,
    ProcessorFacts,
    "logit processor",
    "docs/logit-processors.md",
    types={"name": str, "target": str},
    functions=("refusal",),
    targets=("target",),
)


def processors() -> dict[str, ProcessorFacts]:
    """All that are installed, by name. Raises PluginError for one that is faulty."""
    all_facts = {name: PROCESSORS.find(name) for name in PROCESSORS.names()}
    return {name: facts for name, facts in all_facts.items() if facts is not None}

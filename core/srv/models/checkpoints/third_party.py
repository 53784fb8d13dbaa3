"""Weight loaders of other distributions: entry points of the group `srv.weight_loaders`. Torch-free.

    [project.entry-points."srv.weight_loaders"]
    vault = "package.module:LOADER"             # a LoaderFacts with the name "vault"

`--custom-weight-loader` names them. Only installed packages are asked: no path and no import path is ever taken from a
command line. `srv.platform.extensions` checks what is loaded; the source is imported by a worker
(docs/adr/0076-weight-loaders.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from srv.platform.extensions import Extensions
from srv.specs import ModelFacts

GROUP = "srv.weight_loaders"


class LoaderFacts(NamedTuple):
    """The facts of one loader.

    `target`: "module:Class" of a `srv.models.checkpoints.weight_source.WeightSource`. `refusal(model)`: why the loader
    has no weights for this model, as a clause that follows "the weight loader NAME refuses it:", or None.
    """

    name: str
    target: str
    refusal: Callable[[ModelFacts], str | None]


LOADERS = Extensions(
    GROUP,
    LoaderFacts,
    "weight loader",
    "docs/weight-loaders.md",
    types={"name": str, "target": str},
    functions=("refusal",),
    targets=("target",),
)


def refusal(name: str, model: ModelFacts) -> str | None:
    """The clause of a loader that has no weights for a model. Raises PluginError for a faulty one."""
    facts = LOADERS.find(name)
    return None if facts is None else LOADERS.call(name, "refusal", facts.refusal, model)


def described(names: Sequence[str]) -> str:
    """The loaders with their distributions: "vault of srv-acme and cache of srv-other"."""
    return " and ".join(f"{name} of {LOADERS.provider(name)}" for name in names)

"""Architectures of other distributions: entry points of the group `srv.architectures`. Torch-free.

Must not know the architectures of `srv` itself. `srv.platform.extensions` checks what is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.errors import PluginError
from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import RULES, PermuteRotary, Rename, Skip, Split
from srv.models.families.architecture import GROUP, Architecture, Pooled
from srv.platform.extensions import Extensions, contested


def _fault(architecture: Architecture) -> tuple[str, str] | None:
    """Rules that nothing would apply, and what cannot be called; the member, and a clause."""
    layout = architecture.gguf
    if architecture.pooled is not None and not callable(architecture.pooled):
        return "pooled", f"is {architecture.pooled!r}, not a function"
    for member in ("published_names", "types_after_padding"):
        if getattr(architecture, member):
            return member, "is for architectures of srv: an entry point has the name of one class"
    if layout is not None and not isinstance(layout.weights, tuple):
        return "gguf.weights", f"is {layout.weights!r}, not a tuple"
    for rule in architecture.weights:
        if not isinstance(rule, RULES):
            return "weights", f"has {rule!r}, which is no rule"
    for rule in () if layout is None else layout.weights:
        plain = isinstance(rule, PermuteRotary) and rule == PermuteRotary(rule.dims)
        if not plain and not isinstance(rule, Rename | Skip | Split):
            return "gguf.weights", f"has {rule!r}, which GGUF files do not take"
    return None


ARCHITECTURES = Extensions(
    GROUP,
    Architecture,
    "architecture",
    "docs/architectures.md",
    types={
        "name": str,
        "defaults": Mapping,
        "gguf": (GGUFLayout, type(None)),
        "layers": str,
        "weights": tuple,
        "runs_through_transformers": bool,
        "names": Mapping,
        "former_names": Mapping,
        "text_defaults": Mapping,
    },
    functions=("tree",),
    targets=("layers",),
    fault=_fault,
)


def find_gguf(name: object) -> Architecture | None:
    """The architecture of a GGUF file that `srv` itself does not know.

    The names are in the modules, so all of them are loaded. If none fits, the first fault is raised, because the faulty
    one may be the one that was looked for.
    """
    found: list[Architecture] = []
    faults: list[PluginError] = []
    for each in ARCHITECTURES.names():
        try:
            architecture = ARCHITECTURES.find(each)
        except PluginError as error:
            faults.append(error)
            continue
        if architecture is not None and architecture.gguf is not None and architecture.gguf.name == name:
            found.append(architecture)
    if len(found) > 1:
        raise contested(f"GGUF architecture {name}", [ARCHITECTURES.provider(each.name) for each in found])
    if not found and faults:
        raise faults[0]
    return found[0] if found else None


def tree(architecture: Architecture, config: Mapping[str, Any]) -> Part:
    """Call the distribution's function. Its UnsupportedConfig and errors about values are passed on."""
    expected, name = (KeyError, TypeError, ValueError), architecture.name
    made = ARCHITECTURES.call(name, "tree", architecture.tree, config, expected=expected)
    if not isinstance(made, Part):
        reason = f"returns {made!r:.60}, which is no tree of the model's parts"
        raise ARCHITECTURES.error_in(ARCHITECTURES.provider(name), f"{name}.tree", reason)
    return made


def pooled(architecture: Architecture, config: Mapping[str, Any]) -> Pooled | None:
    """What an architecture that may generate no text says of itself; None for one that generates text.

    Raises PluginError for what is no `Pooled`, and for errors other than KeyError and ValueError.
    """
    if architecture.pooled is None:
        return None
    name = architecture.name
    made: object = ARCHITECTURES.call(name, "pooled", architecture.pooled, config, expected=(KeyError, ValueError))
    if not isinstance(made, Pooled):
        reason = f"returns {made!r:.60}, which is no Pooled"
        raise ARCHITECTURES.error_in(ARCHITECTURES.provider(name), f"{name}.pooled", reason)
    return made

"""The toy device's plugin under another name and with replaced parts, from which every plugin here is made.

Each plugin is a module of this folder with an entry point: the toy device's plugin with one fault. The last line of its
docstring gives the check of the conformance kit that catches it, the level, and a text of the message. Like every
manifest it does not import torch; functions that need torch import it when they are called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from srv.platform.facts import BackendSpec
from srv.platform.manifest import EngineContext, Manifest
from srv_toy_device.facts import FACTS
from srv_toy_device.manifest import MANIFEST

if TYPE_CHECKING:
    from srv.platform.interface import Platform
    from srv_toy_device.platform import ToyPlatform


def manifest(
    name: str,
    *,
    platform: Callable[[type[ToyPlatform]], type[ToyPlatform]] | None = None,
    attention: str = "",
    sampling: str = "",
    facts: dict[str, Any] | None = None,
    **members: Any,
) -> Manifest:
    """The toy's manifest as platform `name`.

    `platform` returns the platform class, given the toy's class under the new name. `attention` and `sampling` are
    targets ("module:function") that replace the toy's backends. `facts` and `members` replace members of
    `PlatformFacts` and `Manifest`.
    """
    changed = {"backends": backends(attention=attention, sampling=sampling), **(facts or {})}
    fields: dict[str, Any] = {
        "name": name,
        "facts": dataclasses.replace(FACTS, **changed),
        "create": create(name, platform),
        **members,
    }
    return dataclasses.replace(MANIFEST, **fields)


def backends(**targets: str) -> dict[str, tuple[BackendSpec, ...]]:
    """The toy's backends by family, with the given targets instead of their own."""
    return {
        family: tuple(dataclasses.replace(spec, target=targets.get(family) or spec.target) for spec in specs)
        for family, specs in FACTS.backends.items()
    }


def create(
    name: str, platform: Callable[[type[ToyPlatform]], type[ToyPlatform]] | None = None
) -> Callable[[EngineContext], Platform]:
    """A `Manifest.create` that returns the toy platform as `name`, or the class that `platform` returns for it."""

    def start(context: EngineContext) -> Platform:
        from srv_toy_device.device import install
        from srv_toy_device.platform import ToyPlatform

        class Renamed(ToyPlatform):
            @property
            def name(self) -> str:
                return name

        kind = Renamed if platform is None else platform(Renamed)
        return kind(install())

    return start

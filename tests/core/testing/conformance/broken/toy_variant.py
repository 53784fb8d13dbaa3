"""The toy device's plugin under another name, with some of its parts exchanged: what every plugin here is made from.

A plugin is a module of this folder and its own entry point. It is the toy device's plugin with one fault; the last
line of its docstring says which check of the conformance kit catches it, at which level, and what the message names.
Like every manifest it imports no torch: what needs it does so when it is called.
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

    `platform` gives the class to use, from the toy's own one under the new name. `attention` and `sampling` are
    targets ("module:function") that take the place of the toy's backends. `facts` and `members` replace members
    of `PlatformFacts` and of `Manifest`.
    """
    changed = {"backends": backends(attention=attention, sampling=sampling), **(facts or {})}
    given: dict[str, Any] = {
        "name": name,
        "facts": dataclasses.replace(FACTS, **changed),
        "create": create(name, platform),
        **members,
    }
    return dataclasses.replace(MANIFEST, **given)


def backends(**targets: str) -> dict[str, tuple[BackendSpec, ...]]:
    """The toy's backends by family, those with a target here built by that instead."""
    return {
        family: tuple(dataclasses.replace(spec, target=targets.get(family) or spec.target) for spec in specs)
        for family, specs in FACTS.backends.items()
    }


def create(
    name: str, platform: Callable[[type[ToyPlatform]], type[ToyPlatform]] | None = None
) -> Callable[[EngineContext], Platform]:
    """A `Manifest.create` that gives the toy platform as `name`, or what `platform` makes of its class."""

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

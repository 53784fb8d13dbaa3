"""The live half of the contract checks: is what `create` returned a platform of this contract version?

`create_platform` is the way from a plugin to a live platform; nothing else in core calls `Manifest.create`.
Knows torch's types through `srv.platform.interface`; the static half, without them, is `srv.platform.checks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from srv.errors import PlatformUnavailable, PluginError, SrvError
from srv.platform import API_VERSION
from srv.platform.checks import Version, check_known_names, check_manifest
from srv.platform.interface import Graphs, OpImpl, Platform
from srv.platform.manifest import EngineContext
from srv.platform.patches import PatchGuard
from srv.platform.registry import Found

__all__ = ["SINCE", "PatchGuard", "check_manifest", "check_platform", "create_platform", "graphs_of"]

SINCE: Mapping[str, Version] = MappingProxyType({"graphs": (1, 1)})
"""Members of `Platform` that came after version 1.0: a plugin written for an older one need not have them,
and core asks before it calls them."""


def create_platform(found: Found, context: EngineContext) -> Platform:
    """The live platform of a plugin, checked.

    PluginError if the plugin was refused, patches core, or returns what is no platform; PlatformUnavailable
    if it cannot serve here (its own, or one made of whatever else it raised).
    """
    manifest = found.loaded
    guard = PatchGuard(origin=found.target.partition(":")[0].partition(".")[0])
    try:
        live = manifest.create(context)
    except SrvError:
        raise
    except Exception as error:
        raise PlatformUnavailable(
            found.name,
            f"{found.distribution} {found.version} failed to start it: {type(error).__name__}: {error}",
            f"Run `srv platforms` to see what it finds; if that looks right, report this to {found.distribution}",
            "create_failed",
        ) from error
    finally:
        guard.check(found.distribution)
    check_platform(live, found.distribution, name=found.name, api=manifest.api)
    return live


def check_platform(
    live: object,
    distribution: str,
    *,
    name: str | None = None,
    api: Version = API_VERSION,
    since: Mapping[str, Version] = SINCE,
) -> None:
    """Raise PluginError unless `live` has every member of `Platform`, compatible, and no other public one.

    `api` is the contract version that the plugin was written for; members that are newer are not asked of it.
    """
    members = {member for member in vars(Platform) if not member.startswith("_")}
    public = {member for member in dir(live) if not member.startswith("_")}
    for member in sorted(members):
        if since.get(member, (1, 0)) <= api:
            _check_member(live, distribution, member)
        elif member in public:
            raise _newer(live, distribution, member, since[member])
    check_known_names(public, members, distribution, type(live).__name__)
    _check_values(cast(Platform, live), distribution, name)


def graphs_of(platform: Platform) -> Graphs | None:
    """The platform's captured steps; None if it has none, or was written for contract 1.0."""
    found: Graphs | None = getattr(platform, "graphs", None)
    return found


def _newer(live: object, distribution: str, member: str, since: Version) -> PluginError:
    """Taken as it is, it would be called without having been checked."""
    return PluginError(
        distribution,
        f"{type(live).__name__}.{member}",
        f"is of contract version {since[0]}.{since[1]}, newer than the one in Manifest.api",
        f"Say api=({since[0]}, {since[1]}), or begin its name with an underscore",
    )


def _check_member(live: object, distribution: str, member: str) -> None:
    path = f"{type(live).__name__}.{member}"
    try:
        value = getattr(live, member)
    except AttributeError as error:
        raise PluginError(
            distribution, path, f"is missing or failed ({error})", f"Implement srv.platform.interface.Platform.{member}"
        ) from error
    wanted = vars(Platform)[member]
    if not isinstance(wanted, property):
        _check_call(value, wanted, distribution, path)


def _check_method(owner: object, wanted: Callable[..., Any], distribution: str, path: str) -> None:
    member = path.rpartition(".")[2]
    if not hasattr(owner, member):
        raise PluginError(distribution, path, "is missing", f"Implement srv.platform.interface.Graphs.{member}")
    _check_call(getattr(owner, member), wanted, distribution, path)


def _check_call(value: object, wanted: Callable[..., Any], distribution: str, path: str) -> None:
    """`value` takes the parameters of `wanted` (a method, its `self` left out), and needs nothing else."""
    if not callable(value):
        raise PluginError(distribution, path, f"is a {type(value).__name__}, not a method", "Make it a method")
    parameters = tuple(inspect.signature(wanted).parameters)[1:]
    if not _accepts(value, parameters):
        raise PluginError(
            distribution,
            path,
            f"has the signature {inspect.signature(value)}",
            f"It must take ({', '.join(parameters)}), by position and by name, and need nothing else",
        )


def _accepts(function: object, parameters: tuple[str, ...]) -> bool:
    assert callable(function)
    signature = inspect.signature(function)
    try:
        signature.bind(*parameters)
        signature.bind(**dict.fromkeys(parameters))
    except TypeError:
        return False
    return True


def _check_values(live: Platform, distribution: str, name: str | None) -> None:
    kind = type(live).__name__
    if name is not None and live.name != name:
        raise PluginError(distribution, f"{kind}.name", f"is {live.name!r}", f"Give the manifest's name, {name!r}")
    for index, impl in enumerate(live.ops):
        if not isinstance(impl, OpImpl):
            raise PluginError(
                distribution,
                f"{kind}.ops[{index}]",
                f"is a {type(impl).__name__}",
                "Give srv.platform.interface.OpImpl objects",
            )
    graphs = graphs_of(live)
    if graphs is not None:
        for member in ("capture", "replay"):
            _check_method(graphs, vars(Graphs)[member], distribution, f"{kind}.graphs.{member}")

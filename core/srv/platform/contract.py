"""The live half of the contract checks: whether `create` returned a platform of this contract version.

`create_platform` is the only place in core that calls `Manifest.create`. This module uses torch's types through
`srv.platform.interface`; the static half, without torch, is `srv.platform.checks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

from srv.dist.group import RankGroup
from srv.errors import PlatformUnavailable, PluginError, SrvError
from srv.platform import API_VERSION
from srv.platform.capabilities import COLLECTIVES, SINCE
from srv.platform.checks import Version, check_known_names
from srv.platform.interface import AttentionBackend, Communicator, Graphs, OpImpl, Platform
from srv.platform.latent import LatentAttentionBackend
from srv.platform.manifest import EngineContext
from srv.platform.patches import PatchGuard
from srv.platform.registry import InstalledPlatform
from srv.specs import AttentionLayer

OPTIONAL: Mapping[str, str] = MappingProxyType(
    {
        "communicator": "communicator",
        "memory_use": "memory_use",
        "profiler_range": "profiler_ranges",
        "graph_piece": "piecewise_graphs",
    }
)
"""The optional members of `Platform`, each with the capability with which a platform must have it."""


def create_platform(platform: InstalledPlatform, context: EngineContext) -> Platform:
    """Create the live platform of a plugin and check it.

    PluginError if the plugin was refused, patches core, or returns something that is not a platform;
    PlatformUnavailable if it cannot serve here (raised by the plugin, or made from any other exception it raised).
    """
    manifest = platform.loaded
    guard = PatchGuard(origin=platform.target.partition(":")[0].partition(".")[0])
    try:
        live = manifest.create(context)
    except SrvError:
        raise
    except Exception as error:
        raise PlatformUnavailable(
            platform.name,
            f"{platform.distribution} {platform.version} failed to start it: {type(error).__name__}: {error}",
            "Run `srv platforms` to see what its probe finds; if it looks right, report this to"
            f" {platform.distribution}",
            "create_failed",
        ) from error
    finally:
        guard.check(platform.distribution)
    capabilities = manifest.facts.capabilities(context.device)
    check_platform(live, platform.distribution, name=platform.name, api=manifest.api, capabilities=capabilities)
    return live


def check_platform(
    live: object,
    distribution: str,
    *,
    name: str | None = None,
    api: Version = API_VERSION,
    since: Mapping[str, Version] = SINCE,
    capabilities: Collection[str] = (),
) -> None:
    """Raise PluginError unless `live` has every member of `Platform`, compatible, and no other public one.

    `api` is the contract version that the plugin was written for. Members that `since` lists with a newer version are
    not required, and refused. Members of `OPTIONAL` are required only with their capability, one of `capabilities`.
    """
    members = {member for member in vars(Platform) if not member.startswith("_")}
    public = {member for member in dir(live) if not member.startswith("_")}
    for member in sorted(members):
        if since.get(member, api) <= api:
            if member in public or OPTIONAL.get(member) in (None, *capabilities):
                _check_member(live, distribution, member)
        elif member in public:
            raise _newer_member_error(live, distribution, member, since[member])
    check_known_names(public, members, distribution, type(live).__name__)
    _check_values(cast(Platform, live), distribution, name)


def join(platform: Platform, group: RankGroup, capabilities: Collection[str]) -> Communicator:
    """The communicator, checked, of a platform with the capability "communicator" for a group of several ranks."""
    communicator = platform.communicator(group)
    path = f"{type(platform).__name__}.communicator({group.name!r})"
    for capability, members in COLLECTIVES.items():
        for member in members if capability in capabilities else ():
            _check_method(communicator, vars(Communicator)[member], platform.name, f"{path}.{member}")
    return communicator


def check_attention(live: object, distribution: str) -> AttentionBackend:
    """Return the attention backend; PluginError if a method is missing, or cannot be called as core calls it."""
    for member in ("supports", "plan", "forward"):
        _check_method(live, vars(AttentionBackend)[member], distribution, f"{type(live).__name__}.{member}")
    return cast(AttentionBackend, live)


def check_latent(live: object, distribution: str) -> LatentAttentionBackend:
    """As `check_attention`, for a backend of latent attention."""
    check_attention(live, distribution)
    member = "prepare"
    _check_method(live, vars(LatentAttentionBackend)[member], distribution, f"{type(live).__name__}.{member}")
    return cast(LatentAttentionBackend, live)


def why_unsupported(backend: AttentionBackend, layer: AttentionLayer, distribution: str) -> str | None:
    """What `supports` says of a layer; PluginError if that is neither None nor a reason."""
    answer: object = backend.supports(layer)
    if answer is None or (isinstance(answer, str) and answer.strip()):
        return answer
    raise PluginError(
        distribution,
        f"{type(backend).__name__}.supports",
        f"returned {answer!r} for {layer}",
        "Return None for a layer that it can compute, and otherwise a clause that says why it cannot",
    )


def _newer_member_error(live: object, distribution: str, member: str, since: Version) -> PluginError:
    """A member that is newer than the plugin's own API version would be called without having been checked."""
    return PluginError(
        distribution,
        f"{type(live).__name__}.{member}",
        f"belongs to contract version {since[0]}.{since[1]}, which is newer than Manifest.api",
        f"Set api=({since[0]}, {since[1]}), or begin its name with an underscore",
    )


def _check_member(live: object, distribution: str, member: str) -> None:
    path = f"{type(live).__name__}.{member}"
    try:
        value = getattr(live, member)
    except AttributeError as error:
        raise PluginError(
            distribution, path, f"is missing or failed ({error})", f"Implement srv.platform.interface.Platform.{member}"
        ) from error
    expected = vars(Platform)[member]
    if not isinstance(expected, property):
        _check_call(value, expected, distribution, path)


def _check_method(owner: object, expected: Callable[..., Any], distribution: str, path: str) -> None:
    member = path.rpartition(".")[2]
    if not hasattr(owner, member):
        owner_name = expected.__qualname__.partition(".")[0]
        raise PluginError(distribution, path, "is missing", f"Implement srv.platform.interface.{owner_name}.{member}")
    _check_call(getattr(owner, member), expected, distribution, path)


def _check_call(value: object, expected: Callable[..., Any], distribution: str, path: str) -> None:
    """Check that `value` takes the parameters of the method `expected` (without `self`) and requires no others."""
    if not callable(value):
        raise PluginError(distribution, path, f"is a {type(value).__name__}, not a method", "Make it a method")
    parameters = tuple(inspect.signature(expected).parameters)[1:]
    if not _accepts(value, parameters):
        raise PluginError(
            distribution,
            path,
            f"has the signature {inspect.signature(value)}",
            f"It must take ({', '.join(parameters)}), by position and by name, and require no other parameter",
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
        raise PluginError(distribution, f"{kind}.name", f"is {live.name!r}", f"Return the manifest's name, {name!r}")
    for index, impl in enumerate(live.ops):
        if not isinstance(impl, OpImpl):
            raise PluginError(
                distribution,
                f"{kind}.ops[{index}]",
                f"is a {type(impl).__name__}",
                "Return srv.platform.interface.OpImpl objects",
            )
    graphs = live.graphs
    if graphs is not None:
        for member in ("capture", "replay"):
            _check_method(graphs, vars(Graphs)[member], distribution, f"{kind}.graphs.{member}")

"""The static half of the contract checks: whether `srv` can work with a manifest.

It runs when a plugin is loaded, without a device and without torch. Every failure is a PluginError that names
the distribution, the member, the reason and the remedy. The live half is in `srv.platform.contract`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import srv
from srv.errors import PluginError
from srv.platform import API_VERSION, OLDEST_API
from srv.platform.capabilities import CAPABILITIES, SINCE
from srv.platform.experts import EXPERT_OPS, MOE_FAMILY
from srv.platform.facts import (
    FAMILIES,
    LENGTHS,
    SUPPORT,
    BackendSpec,
    Constraint,
    Contribution,
    Default,
    DeviceFacts,
    PlatformFacts,
    Support,
)
from srv.platform.manifest import Manifest
from srv.platform.op_checks import check_ops, check_target
from srv.specs import LAYER_TRAITS

Version = tuple[int, int]

_LOWER = "Write the name in lower case: what follows --device is compared in lower case"
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True, slots=True)
class _Plugin:
    """The plugin that is checked; raises a PluginError that names it if a requirement does not hold."""

    distribution: str
    version: str

    def require(self, holds: bool, member: str, reason: str, remedy: str, code: str = "contract") -> None:
        if not holds:
            raise PluginError(self.distribution, member, reason, remedy, code)

    def require_type(self, value: object, kind: type | tuple[type, ...], member: str) -> None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(expected_kind.__name__ for expected_kind in kinds)
        fits = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
        self.require(fits, member, f"is {_shown(value)}, not of type {expected}", f"Use a value of type {expected}")

    def require_text(self, value: object, member: str) -> None:
        self.require_type(value, str, member)
        self.require(bool(str(value).strip()), member, "is empty", "Write a text for the operator who reads it", "text")

    def require_signature(self, function: object, member: str, *parameters: str) -> None:
        """Require a callable of these positional arguments; one without an inspectable signature is accepted."""
        expected = f"({', '.join(parameters)})"
        if not callable(function):
            raise PluginError(
                self.distribution,
                member,
                f"is {_shown(function)}, not callable",
                f"Use a callable {expected} -> ...",
                "signature",
            )
        try:
            signature = inspect.signature(function)
        except ValueError:
            return
        try:
            signature.bind(*parameters)
        except TypeError as error:
            reason, remedy = f"has the signature {signature}", f"It must take {expected} and require no other parameter"
            raise PluginError(self.distribution, member, reason, remedy, "signature") from error


def check_manifest(
    manifest: object,
    distribution: str,
    version: str,
    name: str | None = None,
    *,
    api: Version = API_VERSION,
    oldest: Version = OLDEST_API,
    since: Mapping[str, Version] = SINCE,
    core: str = srv.__version__,
) -> Manifest:
    """Return the manifest if it follows the contract; raise PluginError if not.

    `name` is the entry point's name. `api` and `oldest` are the contract versions that this `srv` supports, `since`
    names what is newer than the oldest, and `core` is its own version: tests check others.
    """
    plugin = _Plugin(distribution, version)
    if not isinstance(manifest, Manifest):
        raise PluginError(
            distribution,
            "entry point",
            f"is {_shown(manifest)}, not a srv.platform.manifest.Manifest",
            "Point it at the Manifest, as in `name = your_package.manifest:MANIFEST`",
        )
    _check_versions(plugin, manifest, api, oldest, core)
    _check_known(plugin, manifest, Manifest, "Manifest")
    _check_members(plugin, manifest, name)
    _check_facts(plugin, manifest, since)
    return manifest


def check_known_names(names: Iterable[str], known_names: Iterable[str], distribution: str, owner: str) -> None:
    """Refuse public names that are not in the contract: core would never call them, and the author should know."""
    known_names = set(known_names)
    for name in sorted(set(names) - known_names):
        import difflib  # imported only if there is a mistake

        close = difflib.get_close_matches(name, known_names, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise PluginError(
            distribution,
            f"{owner}.{name}",
            f"is not a member of contract version {_dotted(API_VERSION)}",
            f"{hint}Remove it, or begin its name with an underscore",
            "unknown_member",
        )


def _check_known(plugin: _Plugin, value: object, contract: type, owner: str) -> None:
    public = (name for name in dir(value) if not name.startswith("_"))
    check_known_names(public, {field.name for field in _fields(contract)}, plugin.distribution, owner)


def _check_versions(plugin: _Plugin, manifest: Manifest, api: Version, oldest: Version, core: str) -> None:
    version = manifest.api
    pair = isinstance(version, tuple) and len(version) == 2 and all(type(part) is int for part in version)
    plugin.require(pair, "Manifest.api", f"is {_shown(version)}", "Use (major, minor), such as api=(2, 1)", "version")
    plugin.require(
        oldest <= version <= api,
        "Manifest.api",
        f"{plugin.distribution} {plugin.version} was written for contract version {_dotted(version)}, "
        f"but this srv {core} supports {_dotted(oldest)} to {_dotted(api)}",
        f"Install a newer srv, or an older {plugin.distribution}"
        if version > api
        else f"Install a newer {plugin.distribution}, or an older srv (for its authors: srv contract diff)",
        "version",
    )
    plugin.require_text(manifest.core, "Manifest.core")
    if (plugin.distribution, plugin.version) == (srv.__name__, core):
        return  # released together
    # It takes about 10 ms, and only third-party plugins need it.
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        specifiers = SpecifierSet(manifest.core)
    except InvalidSpecifier:
        remedy = 'Write it as ">=0.1,<0.2"'
        plugin.require(False, "Manifest.core", f"{manifest.core!r} is not a version specifier", remedy, "version")
        return
    plugin.require(
        specifiers.contains(core, prereleases=True),
        "Manifest.core",
        f"{plugin.distribution} {plugin.version} works with srv {manifest.core}, but this is srv {core}",
        f"Install a version of {plugin.distribution} made for srv {core}, or srv {manifest.core}",
        "version",
    )


def _check_members(plugin: _Plugin, manifest: Manifest, name: str | None) -> None:
    plugin.require_type(manifest.name, str, "Manifest.name")
    plugin.require(
        _NAME.fullmatch(manifest.name) is not None,
        "Manifest.name",
        f"{manifest.name!r} is not a valid platform name",
        "Use lower-case letters, digits and underscores, beginning with a letter",
    )
    plugin.require(
        name is None or manifest.name == name,
        "Manifest.name",
        f"is {manifest.name!r}, but its entry point is called {name!r}",
        "Give both the same name, the one used with --device",
    )
    _check_names(plugin, manifest.variants, "Manifest.variants")
    plugin.require(bool(manifest.variants), "Manifest.variants", "is empty", "Name at least one device generation")
    plugin.require_type(manifest.priority, int, "Manifest.priority")
    plugin.require(manifest.priority >= 0, "Manifest.priority", f"is {manifest.priority}", "Use 0 or more")
    plugin.require_text(manifest.summary, "Manifest.summary")
    plugin.require_type(manifest.facts, PlatformFacts, "Manifest.facts")
    plugin.require_type(manifest.simulated, bool, "Manifest.simulated")
    _check_names(plugin, manifest.options, "Manifest.options")
    plugin.require_signature(manifest.probe, "Manifest.probe", "context: ProbeContext")
    plugin.require_signature(manifest.create, "Manifest.create", "context: EngineContext")
    plugin.require_signature(manifest.worker_env, "Manifest.worker_env", "device: DeviceFacts", "rank: int")
    plugin.require_signature(manifest.sensors, "Manifest.sensors", "device: DeviceFacts")


def _check_names(plugin: _Plugin, names: object, member: str) -> None:
    fits = isinstance(names, tuple) and all(isinstance(name, str) and name for name in names)
    plugin.require(fits, member, f"is {_shown(names)}", 'Use a tuple of names, such as ("one", "two")')


def _check_facts(plugin: _Plugin, manifest: Manifest, since: Mapping[str, Version]) -> None:
    facts = manifest.facts
    _check_known(plugin, facts, PlatformFacts, "PlatformFacts")
    plugin.require_signature(facts.capabilities, "PlatformFacts.capabilities", "device: DeviceFacts")
    _check_profiles(plugin, manifest, since)
    _check_entries(plugin, facts.defaults, Default, "compute", "PlatformFacts.defaults")
    _check_entries(plugin, facts.contributions, Contribution, "compute", "PlatformFacts.contributions")
    _check_entries(plugin, facts.constraints, Constraint, "check", "PlatformFacts.constraints")
    _check_support(plugin, manifest)
    check_ops(facts.ops, plugin)
    plugin.require_type(facts.backends, Mapping, "PlatformFacts.backends")
    for family, specs in facts.backends.items():
        check_backends(family, specs, plugin.distribution, manifest.api, since)
    for spec in facts.backends.get(MOE_FAMILY, ()):
        where, remedy = f"backend {MOE_FAMILY} {spec.name}: ops", "List them in PlatformFacts.ops"
        plugin.require(spec.ops == (), where, "are those of a backend that a third party adds", remedy)


def _check_profiles(plugin: _Plugin, manifest: Manifest, since: Mapping[str, Version]) -> None:
    member, profiles = "PlatformFacts.profiles", manifest.facts.profiles
    for owner, described in ((member, profiles), ("PlatformFacts.cards", manifest.facts.cards)):
        plugin.require_type(described, Mapping, owner)
    for variant in manifest.variants:
        plugin.require(
            variant in profiles and profiles[variant].variant == variant,
            member,
            f"has no profile named {variant!r} of that variant",
            "Give each variant a profile of its own name, so that `srv plan` can resolve for it",
        )
    devices = [(f"{member}[{name!r}]", name, device) for name, device in profiles.items()]
    devices += [(f"PlatformFacts.cards[{name!r}]", name, device) for name, device in manifest.facts.cards.items()]
    for where, name, device in devices:
        plugin.require_type(name, str, where)
        plugin.require(name == name.lower(), where, "is not in lower case", _LOWER)
        plugin.require_type(device, DeviceFacts, where)
        fits = device.variant in manifest.variants
        reason = f"has the variant {device.variant!r}, which Manifest.variants does not name"
        plugin.require(fits, where, reason, f"Use one of {', '.join(manifest.variants)}")
        sized = device.memory_bytes > 0 and device.count > 0
        plugin.require(sized, where, "describes no device", "Set memory_bytes and count above zero")
        _check_capabilities(plugin, manifest, name, device, since)


def _check_capabilities(
    plugin: _Plugin, manifest: Manifest, profile: str, device: DeviceFacts, since: Mapping[str, Version]
) -> None:
    member = f"PlatformFacts.capabilities({profile!r})"
    try:
        capabilities = manifest.facts.capabilities(device)
    except Exception as error:
        raise PluginError(
            plugin.distribution, member, f"raised {_raised(error)}", "It must work for every profile"
        ) from error
    plugin.require_type(capabilities, frozenset, member)
    for unknown in sorted(capabilities - set(CAPABILITIES)):
        import difflib  # imported only if there is a mistake

        close = difflib.get_close_matches(unknown, CAPABILITIES, n=1) or sorted(CAPABILITIES)
        plugin.require(False, member, f"names the unknown capability {unknown!r}", f"Known: {', '.join(close)}")
    for name in sorted(capabilities & set(since)):
        _check_since(plugin, manifest.api, since[name], member, f"names the capability {name!r}")


def _check_since(plugin: _Plugin, api: Version, since: Version, member: str, what: str) -> None:
    """Refuse what a newer contract version than `api` added: core would rely on members that it has not checked."""
    plugin.require(
        since <= api,
        member,
        f"{what} of contract version {_dotted(since)}, which is newer than Manifest.api {_dotted(api)}",
        f"Implement contract version {_dotted(since)} and set api=({since[0]}, {since[1]}), or remove it",
        "version",
    )


def _check_entries(plugin: _Plugin, entries: object, kind: type[Any], function: str, member: str) -> None:
    plugin.require_type(entries, tuple, member)
    assert isinstance(entries, tuple)
    for index, entry in enumerate(entries):
        where = f"{member}[{index}]"
        plugin.require_type(entry, kind, where)
        for field in _fields(kind):
            value, at = getattr(entry, field.name), f"{where}.{field.name}"
            if field.name in ("reads", "replaces"):
                _check_names(plugin, value, at)
            elif field.name in ("of_remaining", "for_default"):
                plugin.require_type(value, bool, at)
            elif field.name != function:
                plugin.require_text(value, at)
        plugin.require_signature(getattr(entry, function), f"{where}.{function}", "context: ResolutionContext")


def _check_support(plugin: _Plugin, manifest: Manifest) -> None:
    plugin.require_type(manifest.facts.support, tuple, "PlatformFacts.support")
    for index, support in enumerate(manifest.facts.support):
        where = f"PlatformFacts.support[{index}]"
        plugin.require_type(support, Support, where)
        plugin.require_text(support.argument, f"{where}.argument")
        known = support.status in SUPPORT
        plugin.require(known, f"{where}.status", f"is {_shown(support.status)}", f"Use one of {', '.join(SUPPORT)}")
        if support.status != "supported":
            plugin.require_text(support.reason, f"{where}.reason")
        _check_names(plugin, support.variants, f"{where}.variants")
        unknown = sorted(set(support.variants) - set(manifest.variants))
        plugin.require(not unknown, f"{where}.variants", f"names {unknown}", f"Use {', '.join(manifest.variants)}")
        for member in ("values", "only"):
            plugin.require_type(getattr(support, member), tuple, f"{where}.{member}")
        both = bool(support.values and support.only)
        plugin.require(not both, where, "has both `values` and `only`", "Set one of them, or neither")


def check_backends(
    family: str,
    specs: object,
    distribution: str,
    api: Version = API_VERSION,
    since: Mapping[str, Version] = SINCE,
) -> tuple[BackendSpec, ...]:
    """Check the backend specs of one family: a platform's own, or a third party's for that platform.

    `api` is the contract version that the platform was written for. A third party's backend names none.
    """
    plugin = _Plugin(distribution, "")
    member = f"backends[{family!r}]"
    plugin.require(family in FAMILIES, member, "is not a backend family", f"Known families: {', '.join(FAMILIES)}")
    plugin.require_type(specs, tuple, member)
    assert isinstance(specs, tuple)
    for index, spec in enumerate(specs):
        plugin.require_type(spec, BackendSpec, f"{member}[{index}]")
        _check_backend(plugin, family, spec)
        if family == "attention":
            _check_attention(plugin, spec)
        for field in _fields(BackendSpec):
            added = since.get(f"BackendSpec.{field.name}")
            if added is not None and getattr(spec, field.name) != field.default:
                where = f"backend {family} {spec.name}: {field.name}"
                _check_since(plugin, api, added, where, f"is {_shown(getattr(spec, field.name))}, a value")
    _check_unique(plugin, member, specs)
    return specs


def _check_backend(plugin: _Plugin, family: str, spec: BackendSpec) -> None:
    where = f"backend {family} {spec.name}"
    plugin.require_text(spec.name, f"{where}: name")
    plugin.require_type(spec.priority, int, f"{where}: priority")
    plugin.require_signature(spec.check, f"{where}: check", "context: ResolutionContext")
    if family != MOE_FAMILY:
        check_target(plugin, spec.target, f"{where}: target")
    remedy = "Leave it empty: the backend is the ops of its name, in PlatformFacts.ops or BackendSpec.ops"
    plugin.require(family != MOE_FAMILY or spec.target == "", f"{where}: target", f"is {spec.target!r}", remedy)
    _check_added_ops(plugin, family, spec, f"{where}: ops")
    _check_names(plugin, spec.arguments, f"{where}: arguments")
    for flag in ("fallback", "graphs", "batch_invariant"):
        plugin.require_type(getattr(spec, flag), bool, f"{where}: {flag}")


def _check_added_ops(plugin: _Plugin, family: str, spec: BackendSpec, where: str) -> None:
    check_ops(spec.ops, plugin, where)
    remedy = f"Only backends of the family {MOE_FAMILY} have ops; leave it empty"
    plugin.require(family == MOE_FAMILY or spec.ops == (), where, f"are those of a backend of {family}", remedy)
    for index, op in enumerate(spec.ops):
        where_op = f"{where}[{index}]"
        known = op.op in EXPERT_OPS
        plugin.require(known, f"{where_op}.op", f"is {_shown(op.op)}", f"Use one of {', '.join(EXPERT_OPS)}")
        remedy = f"Call it {spec.name}, as the backend"
        plugin.require(op.name == spec.name, f"{where_op}.name", f"is {_shown(op.name)}", remedy)
        check_target(plugin, op.target, f"{where_op}.target")


def _check_attention(plugin: _Plugin, spec: BackendSpec) -> None:
    where = f"backend attention {spec.name}"
    plugin.require_text(spec.kv_order, f"{where}: kv_order")
    remedy = f"Use one of {', '.join(LENGTHS)}"
    plugin.require(spec.lengths in LENGTHS, f"{where}: lengths", f"is {_shown(spec.lengths)}", remedy)
    _check_names(plugin, spec.traits, f"{where}: traits")
    unknown = sorted(set(spec.traits) - set(LAYER_TRAITS))
    plugin.require(not unknown, f"{where}: traits", f"names {unknown}", f"Use {', '.join(LAYER_TRAITS)}")
    check_target(plugin, spec.latent or spec.target, f"{where}: latent")
    if spec.prompts is not None:
        plugin.require_signature(spec.prompts, f"{where}: prompts", "dims: LatentDims", "arguments: Mapping[str, Any]")


def _check_unique(plugin: _Plugin, member: str, specs: tuple[BackendSpec, ...]) -> None:
    by_name: dict[str, BackendSpec] = {}
    by_priority: dict[int, BackendSpec] = {}
    for spec in specs:
        plugin.require(spec.name not in by_name, member, f"names {spec.name} twice", "Give each backend its own name")
        rival = by_priority.get(spec.priority)
        plugin.require(
            rival is None,
            member,
            f"{rival.name if rival else ''} and {spec.name} have the same priority {spec.priority}",
            "Automatic choice takes the highest priority that fits, so no two may be equal",
        )
        by_name[spec.name] = by_priority[spec.priority] = spec


def _fields(kind: Callable[..., Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)  # type: ignore[arg-type]


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

"""Discovery of plugins: from entry points to checked manifests. Torch-free; must not know any plugin by name.

    srv.platforms              <platform> = package.manifest:MANIFEST
    srv.backends.<family>      <platform>.<backend> = package.module:SPEC     (a third-party backend for a platform)

A faulty plugin never affects the others: its fault becomes the `error` of its own entry. `srv.platform.installed`
reads the entry points and their distributions (docs/adr/0001-platform-contract.md).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import srv
from srv.errors import PluginError
from srv.platform.checks import check_backends, check_manifest
from srv.platform.facts import FAMILIES, BackendSpec, Unfit
from srv.platform.import_wall import ImportWall
from srv.platform.installed import Entry, entries
from srv.platform.manifest import Manifest
from srv.platform.patches import PatchGuard

PLATFORM_GROUP = "srv.platforms"
BACKEND_GROUP = "srv.backends"

_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


class InstalledPlatform(NamedTuple):
    """One entry of the group `srv.platforms`: its checked manifest, or the error that made core refuse it.

    `target` is the entry point's "module:attribute", which the probe's child process loads again.
    """

    name: str
    distribution: str
    version: str
    manifest: Manifest | None
    error: PluginError | None
    target: str = ""

    @property
    def loaded(self) -> Manifest:
        """The manifest; raises the plugin's error if it was refused."""
        if self.manifest is not None:
            return self.manifest
        raise self.error or PluginError(self.distribution, self.name, "has no manifest", "Reinstall it", "contested")


@dataclass(frozen=True, slots=True)
class ProvidedBackend(BackendSpec):
    """A backend that another distribution adds to a platform. `provider`: its name and version, "srv-acme 1.2.0"."""

    provider: str = ""


class Platforms(Mapping[str, InstalledPlatform]):
    """Every installed platform by name, sorted; refused ones carry their error.

    A platform is loaded when it is first accessed, so a command that needs one does not wait for the others.
    """

    def __init__(self, entry_points: Iterable[Entry]) -> None:
        by_name: dict[str, list[Entry]] = defaultdict(list)
        for entry_point in entry_points:
            by_name[entry_point.name].append(entry_point)
        self._entry_points = {name: by_name[name] for name in sorted(by_name)}
        self._loaded: dict[str, InstalledPlatform] = {}

    def __getitem__(self, name: str) -> InstalledPlatform:
        if name not in self._loaded:
            self._loaded[name] = _load_platform(name, self._entry_points[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entry_points

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry_points)

    def __len__(self) -> int:
        return len(self._entry_points)


def find_platforms() -> Platforms:
    """The installed platforms; none is loaded yet."""
    return Platforms(entries(PLATFORM_GROUP))


def find_backends(platform: str, family: str) -> tuple[BackendSpec, ...]:
    """Backends that third parties add to a platform, best first.

    A faulty one is returned as a backend that never fits, with its fault as the reason, so a user who
    selects it gets that message.
    """
    if family not in FAMILIES:
        raise ValueError(f"{family!r} is not a backend family; known: {', '.join(FAMILIES)}")
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry_point in entries(f"{BACKEND_GROUP}.{family}"):
        owner, _, name = entry_point.name.partition(".")
        if owner == platform:
            by_name[name].append(entry_point)
    specs = [_load_backend(name, by_name[name]) for name in sorted(by_name)]
    return tuple(sorted(specs, key=lambda spec: -spec.priority))


def find_all_backends(platform: str) -> dict[str, tuple[BackendSpec, ...]]:
    """`find_backends` for every family."""
    return {family: find_backends(platform, family) for family in FAMILIES}


def _load_platform(name: str, entry_points: list[Entry]) -> InstalledPlatform:
    if len(entry_points) > 1:
        return _refused_duplicate(name, entry_points)
    entry_point = entry_points[0]
    distribution, version = entry_point.distribution, entry_point.version
    try:
        manifest = check_manifest(load(entry_point), distribution, version, name)
    except PluginError as error:
        return InstalledPlatform(name, distribution, version, None, error, entry_point.value)
    return InstalledPlatform(name, distribution, version, manifest, None, entry_point.value)


def _refused_duplicate(name: str, entry_points: list[Entry]) -> InstalledPlatform:
    """Two distributions claim one name: both are refused, whichever was installed first."""
    error = _duplicate_error(f"platform {name}", entry_points)
    return InstalledPlatform(name, error.distribution, "", None, error)


def _duplicate_error(what: str, entry_points: list[Entry]) -> PluginError:
    both = " and ".join(sorted(entry_point.distribution for entry_point in entry_points))
    return PluginError(both, what, "both claim this name", f"Uninstall all but one of {both}", "contested")


def _load_backend(name: str, entry_points: list[Entry]) -> BackendSpec:
    try:
        return checked_backend(entry_points[0])
    except PluginError as error:
        unfit = Unfit((f"it was refused when it was loaded: {error}",))
        provider = _provider(entry_points[0])
        return ProvidedBackend(name, 0, lambda _: unfit, entry_points[0].value, kv_order="none", provider=provider)


def checked_backend(entry_point: Entry) -> ProvidedBackend:
    """The backend of an entry point. PluginError if it is faulty, or if another one of the platform has its name."""
    same = [entry for entry in entries(entry_point.group) if entry.name == entry_point.name]
    if len(same) > 1:
        raise _duplicate_error(f"backend {entry_point.name}", same)
    distribution, family = entry_point.distribution, entry_point.group.removeprefix(f"{BACKEND_GROUP}.")
    platform, _, name = entry_point.name.partition(".")
    (spec,) = check_backends(family, (load(entry_point),), distribution)
    if spec.name != name:
        raise PluginError(
            distribution,
            f"entry point {entry_point.name}",
            f"has a backend called {spec.name!r}",
            "Name the entry point <platform>.<backend>",
        )
    owner = find_platforms().get(platform)
    specs = () if owner is None or owner.manifest is None else owner.manifest.facts.backends.get(family, ())
    if owner is not None and name in (spec.name for spec in specs):
        both, remedy = f"{owner.distribution} and {distribution}", f"Uninstall {distribution}, or rename its backend"
        raise PluginError(both, f"backend {entry_point.name}", "both claim this name", remedy, "contested")
    values = {field.name: getattr(spec, field.name) for field in fields(BackendSpec)}
    return ProvidedBackend(**values, provider=_provider(entry_point))


def _provider(entry_point: Entry) -> str:
    return f"{entry_point.distribution} {entry_point.version}".strip()


def check_requirement(entry_point: Entry) -> None:
    """PluginError unless this srv is one that the distribution of an entry point requires."""
    if not entry_point.requires or entry_point.distribution == srv.__name__:
        return
    from packaging.requirements import InvalidRequirement, Requirement  # about 10 ms, for third-party plugins only

    distribution, version = entry_point.distribution, entry_point.version
    try:
        required = Requirement(entry_point.requires)
    except InvalidRequirement:
        return  # no installer would have accepted it
    if (required.marker is None or required.marker.evaluate()) and not required.specifier.contains(
        srv.__version__, prereleases=True
    ):
        raise PluginError(
            distribution,
            f"entry point {entry_point.name} of {entry_point.group}",
            f"{distribution} {version} requires {required}, but this is srv {srv.__version__}",
            f"Install a version of {distribution} made for srv {srv.__version__}, or {required}",
            "version",
        )


def load(entry_point: Entry) -> object:
    """Load the object that an entry point names.

    PluginError if its distribution requires another srv, or if importing it fails, imports torch, or patches core.
    """
    check_requirement(entry_point)
    distribution = entry_point.distribution
    if entry_point.module in sys.modules:  # nothing is imported, so that no code of the plugin could patch core
        try:
            extension: object = entry_point.load()
        except Exception as error:
            raise _import_error(distribution, entry_point.value, error) from error
        return extension
    guard = PatchGuard(origin=entry_point.module.partition(".")[0])
    try:
        with ImportWall() as wall:
            loaded: object = entry_point.load()
    except (Exception, SystemExit) as error:
        guard.check(distribution)
        if wall.attempted:
            raise impure_manifest_error(distribution, entry_point.value, wall.attempted) from error
        raise _import_error(distribution, entry_point.value, error) from error
    guard.check(distribution)
    if wall.attempted:
        raise impure_manifest_error(distribution, entry_point.value, wall.attempted)
    return loaded


def impure_manifest_error(distribution: str, target: str, attempted: Iterable[str]) -> PluginError:
    """The refusal of a manifest that imports torch or a vendor's SDK."""
    return PluginError(
        distribution,
        target,
        f"importing it imports {', '.join(dict.fromkeys(attempted))}",
        "A manifest must be pure data: move that import into `create` or into the probe",
        "impure",
    )


def _import_error(distribution: str, target: str, error: BaseException) -> PluginError:
    unexpected = _UNEXPECTED.search(str(error)) if isinstance(error, TypeError) else None
    if unexpected:
        owner, member = unexpected.groups()
        return PluginError(
            distribution,
            f"{owner}.{member}",
            "is unknown to this version of the contract",
            "Remove it, or install the srv that the plugin was written for",
            "unknown_member",
        )
    return PluginError(
        distribution,
        target,
        f"importing it raised {type(error).__name__}: {error}",
        f"Reinstall or update {distribution}, or uninstall it",
        "import_failed",
    )

"""Architectures of other distributions: entry points of the group `srv.architectures`. Torch-free.

Owns their checks. Whatever is wrong with one becomes a PluginError that names the distribution, and is raised only for
models of that architecture. Must not know the architectures of `srv` itself, except that a name is taken.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from srv.errors import PluginError
from srv.models.architectures.architecture import GROUP, Architecture, NativeConfig
from srv.models.formats.gguf_layout import GGUFLayout
from srv.platform.installed import Entry, entries

_KINDS: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("name", str),
    ("defaults", Mapping),
    ("gguf", (GGUFLayout, type(None))),
    ("layers", str),
)


def names() -> tuple[str, ...]:
    """The Hugging Face classes that other distributions provide; none is loaded."""
    return tuple(dict.fromkeys(entry.name for entry in entries(GROUP)))


def find(name: str, *, taken: bool) -> Architecture | None:
    """The architecture of this name, or None. `taken`: `srv` has one of this name, which none may replace."""
    entry = _entry(name, taken=taken)
    return None if entry is None else _load(entry, tuple(sys.path))


def find_gguf(name: object) -> Architecture | None:
    """The architecture of a GGUF file that `srv` itself does not know.

    The names are in the modules, so all of them are loaded. If none fits, the first fault is raised, because the faulty
    one may be the one that was looked for.
    """
    found: list[Architecture] = []
    faults: list[PluginError] = []
    for each in names():
        try:
            architecture = find(each, taken=False)
        except PluginError as error:
            faults.append(error)
            continue
        if architecture is not None and architecture.gguf is not None and architecture.gguf.name == name:
            found.append(architecture)
    if len(found) > 1:
        raise _contested(f"GGUF architecture {name}", [provider(each) for each in found])
    if not found and faults:
        raise faults[0]
    return found[0] if found else None


def make_config(architecture: Architecture, config: Mapping[str, Any]) -> NativeConfig:
    """Call the distribution's function. Its UnsupportedConfig and errors about values are passed on."""
    try:
        return architecture.make_config(config)
    except (KeyError, TypeError, ValueError):
        raise
    except Exception as error:
        reason = f"raised {type(error).__name__}: {error}"
        raise error_in(provider(architecture), f"{architecture.name}.make_config", reason) from error


def _entry(name: str, *, taken: bool = False) -> Entry | None:
    found = [entry for entry in entries(GROUP) if entry.name == name]
    owners = [entry.distribution for entry in found] + (["srv"] if taken and found else [])
    if len(owners) > 1:
        raise _contested(f"architecture {name}", owners)
    return found[0] if found else None


def provider(architecture: Architecture) -> str:
    """The name of the distribution that an architecture comes from."""
    entry = _entry(architecture.name)
    return "unknown" if entry is None else entry.distribution


@functools.lru_cache
def _load(entry: Entry, import_path: tuple[str, ...]) -> Architecture:
    """Import and check one architecture, cached per import path. Faulty ones are not cached."""
    from srv.platform.registry import load  # imported late: most installations have no such entry point

    loaded = load(entry)
    if not isinstance(loaded, Architecture):
        reason = f"is {type(loaded).__name__}, not an Architecture"
        raise error_in(entry.distribution, entry.value, reason)
    for field, kind in _KINDS:
        if not isinstance(getattr(loaded, field), kind):
            raise error_in(entry.distribution, f"{entry.name}.{field}", f"is {getattr(loaded, field)!r}")
    if loaded.name != entry.name:
        raise error_in(entry.distribution, f"entry point {entry.name}", f"has an architecture called {loaded.name!r}")
    if not callable(loaded.make_config):
        raise error_in(entry.distribution, f"{entry.name}.make_config", "is not a function")
    module, _, attribute = loaded.layers.partition(":")
    if not (module and attribute):
        raise error_in(entry.distribution, f"{entry.name}.layers", f'is {loaded.layers!r}, not "module:Class"')
    return loaded


def error_in(distribution: str, member: str, reason: str, code: str = "contract") -> PluginError:
    """A fault of a distribution's architecture."""
    remedy = f"Update or uninstall {distribution}; docs/architectures.md says what an architecture consists of"
    return PluginError(distribution, member, reason, remedy, code)


def _contested(what: str, owners: list[str]) -> PluginError:
    both = " and ".join(sorted(owners))
    others = " or ".join(sorted(owner for owner in owners if owner != "srv"))
    return PluginError(both, what, "both claim this name", f"Uninstall {others}", "contested")

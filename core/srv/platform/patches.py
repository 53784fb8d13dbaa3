"""Detects a plugin that patches core by comparing `srv`'s modules before and after the plugin's code has run.

Owns the comparison and the restoration; must not know why foreign code was run. It compares all names of loaded
`srv` modules and of the classes defined there, by identity, and the code of their functions. Every command compares
thousands of names when it starts: hence the plain loops over dicts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from srv.errors import PluginError

_CORE = __name__.partition(".")[0]
_ABSENT = object()
Owner = ModuleType | type
Change = tuple[str, Callable[[], None]]  # the dotted path of a changed name, and a function that restores it


class _Snapshot:
    """The state of a module or class: its values by name, and the code of the functions among them."""

    __slots__ = ("codes", "owner", "values")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.values: dict[str, Any] = {}
        self.codes: list[tuple[str, FunctionType, tuple[Any, ...]]] = []
        for name, value in tuple(vars(owner).items()):
            function = _function(value)
            if function is not None:
                self.codes.append((name, function, _code(function)))
            elif name.startswith("__"):
                continue  # the interpreter and typing set these lazily; only dunder functions are compared
            self.values[name] = value

    def changes(self) -> Iterator[Change]:
        """Names that were replaced, added or removed, and functions whose code changed. New submodules are allowed."""
        now = dict(vars(self.owner))
        for name, value in self.values.items():
            if now.get(name, _ABSENT) is not value:
                yield _path(self.owner, name), partial(setattr, self.owner, name, value)
        for name, function, code in self.codes:
            if any(new is not old for new, old in zip(_code(function), code, strict=True)):
                yield _path(self.owner, name), partial(_set_code, function, code)
        for name in now.keys() - self.values.keys():
            if not name.startswith("__") and not isinstance(now[name], ModuleType):
                yield _path(self.owner, name), partial(delattr, self.owner, name)

    def foreign(self, origin: str) -> Iterator[Change]:
        """Functions and classes that are defined in the package `origin`."""
        for name, value in self.values.items():
            if not name.startswith("__") and _defining_module(value).partition(".")[0] == origin:
                yield _path(self.owner, name), partial(delattr, self.owner, name)


class PatchGuard:
    """Records the state of core when the guard is created; `check` compares.

    `origin` is the top-level package of the plugin. A module of core that is imported for the first time after that
    has no recorded state; there, a function defined in the plugin's package reveals the patch.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._modules = _modules()
        self._snapshots = {id(owner): _Snapshot(owner) for owner in _owners(self._modules)}

    def check(self, distribution: str) -> None:
        """Raise PluginError if core was changed, after restoring it."""
        changes = tuple(self._changes(_modules()))
        if not changes:
            return
        for _, restore in changes:
            restore()
        paths = sorted({path for path, _ in changes})
        raise PluginError(
            distribution,
            paths[0],
            f"it changed {', '.join(paths)} of srv while it was loaded",
            "A plugin may extend srv only through its manifest and its platform object; it must not patch core. "
            f"Uninstall {distribution} or ask its maintainer for a version that does not",
            "patches_core",
        )

    def _changes(self, modules: dict[str, ModuleType]) -> Iterator[Change]:
        for name, module in self._modules.items():
            if modules.get(name) is not module:
                yield name, partial(sys.modules.__setitem__, name, module)
        for before in self._snapshots.values():
            yield from before.changes()
        for owner in _owners(modules):
            if id(owner) not in self._snapshots:
                yield from _Snapshot(owner).foreign(self._origin)


def _modules() -> dict[str, ModuleType]:
    """The loaded modules of core, by name."""
    return {
        name: module
        for name, module in tuple(sys.modules.items())
        if name.partition(".")[0] == _CORE and isinstance(module, ModuleType)
    }


def _owners(modules: dict[str, ModuleType]) -> Iterator[Owner]:
    """Modules, and the classes defined in them."""
    for module_name, module in modules.items():
        yield module
        for value in tuple(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module_name:
                yield value


def _path(owner: Owner, name: str) -> str:
    prefix = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    return f"{prefix}.{name}"


def _code(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _set_code(function: FunctionType, code: tuple[Any, ...]) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = code


def _function(value: Any) -> FunctionType | None:
    if isinstance(value, FunctionType):
        return value
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def _defining_module(value: Any) -> str:
    """The module in which a function or class is defined; `functools.wraps` cannot disguise it."""
    function = _function(value)
    if function is not None:
        return str(function.__globals__.get("__name__", ""))
    return value.__module__ if isinstance(value, type) else ""

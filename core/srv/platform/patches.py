"""Detecting a plugin that patches core: what `srv` consists of, before and after foreign code has run.

Owns the comparison and the undoing; must not know why foreign code was run. Compared are all names of
loaded `srv` modules and of the classes defined there, by identity, and the code of their functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from srv.errors import PluginError

_CORE = __name__.partition(".")[0]
Owner = ModuleType | type


@dataclass(frozen=True, slots=True)
class _Member:
    """One name of a module or class as it was: its value, and the code behind it if it is a function."""

    owner: Owner
    name: str
    value: Any
    code: tuple[Any, ...] | None

    @property
    def path(self) -> str:
        owner = self.owner
        prefix = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        return f"{prefix}.{self.name}"


class PatchGuard:
    """Remembers core as it is when the guard is made.

    `origin` is the top-level package of the plugin: a module of core that is first imported meanwhile has
    no "before", so there a function that comes from that package is what gives the patch away.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._before = {(id(member.owner), member.name): member for member in _members()}
        self._owners = {id(member.owner) for member in self._before.values()}

    def changes(self) -> tuple[str, ...]:
        """Dotted paths of what was replaced, added or removed since, sorted."""
        return tuple(sorted({member.path for member in self._changed()}))

    def check(self, distribution: str) -> None:
        """Raise PluginError if core was changed, after putting it back as it was."""
        changed = self.changes()
        if not changed:
            return
        self._undo()
        raise PluginError(
            distribution,
            changed[0],
            f"it replaced {', '.join(changed)} of srv while it was loaded",
            "A plugin extends srv through its manifest and the platform object alone; it must not patch core. "
            f"Uninstall {distribution} or ask its maker for a version that does not",
        )

    def _changed(self) -> Iterator[_Member]:
        now = {(id(member.owner), member.name): member for member in _members()}
        for key, old in self._before.items():
            new = now.get(key)
            if new is None or new.value is not old.value or new.code != old.code:
                yield old
        for key, new in now.items():
            if key not in self._before and self._is_foreign(new):
                yield new

    def _is_foreign(self, member: _Member) -> bool:
        """A new name in a known owner, or the plugin's own function in an owner that is new."""
        if isinstance(member.value, ModuleType) or member.name.startswith("__"):
            return False
        if id(member.owner) in self._owners:
            return True
        return _home(member.value).partition(".")[0] == self._origin

    def _undo(self) -> None:
        for member in tuple(self._changed()):
            old = self._before.get((id(member.owner), member.name))
            if old is None:
                delattr(member.owner, member.name)
                continue
            setattr(old.owner, old.name, old.value)
            function = _function(old.value)
            if function is not None and old.code is not None:
                function.__code__, function.__defaults__, function.__kwdefaults__ = old.code


def _members() -> Iterator[_Member]:
    for module_name, module in tuple(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] != _CORE:
            continue
        yield from _names(module, vars(module))
        for value in tuple(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module_name:
                yield from _names(value, vars(value))


def _names(owner: Owner, names: Mapping[str, Any]) -> Iterator[_Member]:
    for name, value in tuple(names.items()):
        function = _function(value)
        # Interpreter and typing fill dunder attributes in lazily; dunder functions are what matters of them.
        if function is None and name.startswith("__"):
            continue
        code = None if function is None else (function.__code__, function.__defaults__, function.__kwdefaults__)
        yield _Member(owner, name, value, code)


def _function(value: Any) -> FunctionType | None:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None


def _home(value: Any) -> str:
    """The module that a function or class was written in; `functools.wraps` cannot disguise it."""
    function = _function(value)
    if function is not None:
        return str(function.__globals__.get("__name__", ""))
    return value.__module__ if isinstance(value, type) else ""

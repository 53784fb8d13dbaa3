"""Objects of one type that other distributions add by entry points, such as architectures. Torch-free.

Owns what all groups of such entry points share: the checks, and the errors. Whatever is wrong with an object becomes a
PluginError that names its distribution, and is raised only when that object is needed. Must not know what the objects
are for (docs/adr/0021-architectures.md).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from srv.errors import PluginError
from srv.platform.installed import Entry, entries

T = TypeVar("T")
Base = TypeVar("Base")
Result = TypeVar("Result")


class Extensions(Generic[T]):
    """The objects of `kind` in one group of entry points; the name of an entry point is the object's `name`.

    noun: what errors call such an object. page: its documentation. types: the types of the object's members.
    functions: members that must be callable. targets: members that are "module:Class". fault: what else is wrong with
    an object, as the member and a clause, or None.
    """

    def __init__(
        self,
        group: str,
        kind: type[T],
        noun: str,
        page: str,
        types: Mapping[str, type | tuple[type, ...]],
        functions: tuple[str, ...] = (),
        targets: tuple[str, ...] = (),
        fault: Callable[[T], tuple[str, str] | None] = lambda loaded: None,
    ) -> None:
        self.group, self.kind, self.noun, self.types = group, kind, noun, types
        self.functions, self.targets, self.fault, self._page = functions, targets, fault, page

    def names(self) -> tuple[str, ...]:
        """The names that other distributions provide; none is loaded."""
        return tuple(dict.fromkeys(entry.name for entry in entries(self.group)))

    def find(self, name: str, *, taken: bool = False) -> T | None:
        """The object of this name, or None. `taken`: `srv` has one of this name, which none may replace."""
        entry = self._entry(name, taken=taken)
        return None if entry is None else _load(self, entry, tuple(sys.path))

    def provider(self, name: str) -> str:
        """The name of the distribution that provides the object of this name."""
        entry = self._entry(name)
        return "unknown" if entry is None else entry.distribution

    def call(
        self,
        name: str,
        member: str,
        function: Callable[..., Result],
        *args: Any,
        expected: tuple[type[Exception], ...] = (),
    ) -> Result:
        """Call a distribution's function. Its `expected` exceptions are passed on, all others become a PluginError."""
        try:
            return function(*args)
        except expected:
            raise
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}"
            raise self.error_in(self.provider(name), f"{name}.{member}", reason) from error

    def import_class(self, name: str, member: str, target: str, base: type[Base], *, built_in: bool) -> type[Base]:
        """The class that `target`, a member of an object, names: a subclass of `base`.

        `built_in`: the object belongs to `srv`, so what its import raises is passed on.
        """
        with _forgotten_if_refused(target):
            return self._import_class(name, member, target, base, built_in=built_in)

    def _import_class(self, name: str, member: str, target: str, base: type[Base], *, built_in: bool) -> type[Base]:
        module, _, attribute = target.partition(":")
        try:
            cls: object = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            if built_in:
                raise
            reason = f"importing {target} raised {type(error).__name__}: {error}"
            raise self.error_in(self.provider(name), f"{name}.{member}", reason, "import_failed") from error
        if not (isinstance(cls, type) and issubclass(cls, base)):
            reason = f"{target} is not a subclass of {base.__module__}.{base.__qualname__}"
            raise self.error_in(self.provider(name), f"{name}.{member}", reason)
        return cls

    def error_in(self, distribution: str, member: str, reason: str, code: str = "contract") -> PluginError:
        """A fault of an object of a distribution."""
        return PluginError(distribution, member, reason, f"Update or uninstall {distribution}; {self.page_says}", code)

    @property
    def page_says(self) -> str:
        """A clause that names the page to read."""
        return f"{self._page} says what {_with_article(self.noun)} consists of"

    def _entry(self, name: str, *, taken: bool = False) -> Entry | None:
        matches = [entry for entry in entries(self.group) if entry.name == name]
        owners = [entry.distribution for entry in matches] + (["srv"] if taken and matches else [])
        if len(owners) > 1:
            raise contested(f"{self.noun} {name}", owners)
        return matches[0] if matches else None


def contested(what: str, owners: list[str], claimed: str = "this name") -> PluginError:
    """The refusal of what several distributions claim."""
    if len(set(owners)) == 1:
        (owner,) = set(owners)
        return PluginError(owner, what, f"claims {claimed} twice", f"Update or uninstall {owner}", "contested")
    both = " and ".join(sorted(owners))
    others = " or ".join(sorted(owner for owner in owners if owner != "srv"))
    return PluginError(both, what, f"both claim {claimed}", f"Uninstall {others}", "contested")


@contextmanager
def _forgotten_if_refused(target: str) -> Iterator[None]:
    """Forget the modules of the package of "module:attribute" that are imported in the context if it raises an error.

    They would hide those of a package that is updated while the process runs. Modules that were there before stay.
    """
    package, before = target.partition(":")[0].partition(".")[0], set(sys.modules)
    try:
        yield
    except Exception:
        for name in sys.modules.keys() - before:
            if name == package or name.startswith(f"{package}."):
                del sys.modules[name]
        raise


@functools.lru_cache
def _load(extensions: Extensions[T], entry: Entry, import_path: tuple[str, ...]) -> T:
    """Import and check one object, cached per import path. Faulty ones are not cached, and leave no modules."""
    with _forgotten_if_refused(entry.value):
        return _loaded(extensions, entry)


def _loaded(extensions: Extensions[T], entry: Entry) -> T:
    from srv.platform.found_by_stevedore import load_all  # slow to import; most installations have no such entry point

    try:
        ((_, loaded),) = load_all(extensions.group, [entry])
    except PluginError as error:
        if error.code != "import_failed":
            raise
        remedy = f"{error.remedy}; {extensions.page_says}"  # it may be of an older form
        raise PluginError(error.distribution, error.member, error.reason, remedy, error.code) from error
    owner, kind = entry.distribution, extensions.kind
    if not isinstance(loaded, kind):
        reason = f"is {type(loaded).__name__}, not {_with_article(kind.__name__)}"
        raise extensions.error_in(owner, entry.value, reason)
    for field, types in extensions.types.items():
        if not isinstance(getattr(loaded, field), types):
            raise extensions.error_in(owner, f"{entry.name}.{field}", f"is {getattr(loaded, field)!r}")
    if (fault := extensions.fault(loaded)) is not None:
        raise extensions.error_in(owner, f"{entry.name}.{fault[0]}", fault[1])
    name = getattr(loaded, "name", None)
    if name != entry.name:
        reason = f"has {_with_article(extensions.noun)} called {name!r}"
        raise extensions.error_in(owner, f"entry point {entry.name}", reason)
    for field in extensions.functions:
        if not callable(getattr(loaded, field)):
            raise extensions.error_in(owner, f"{entry.name}.{field}", "is not a function")
    for field in extensions.targets:
        target = getattr(loaded, field)
        if target is not None and not all(target.partition(":")[::2]):
            raise extensions.error_in(owner, f"{entry.name}.{field}", f'is {target!r}, not "module:Class"')
    return loaded


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"

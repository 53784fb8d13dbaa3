"""Arguments that plugins declare with the hook `srv_arguments`. Torch-free; loads plugins only if some are installed.

They are declared like core's, and read from the same sources. No default, constraint or backend of `srv` or of a
platform may refer to them, so resolving one means finding the user's strongest statement. The frozen configuration
keeps them in `Config.extras`, as JSON values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from srv.args.spec import Argument, read_group
from srv.platform.extensions import contested
from srv.platform.hook_plugins import HookPlugin, Hooks, hook_plugins

_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
# Flags of commands that take server arguments; they are not arguments themselves.
_RESERVED = frozenset({"config", "device", "dialect", "help", "json", "model_path", "report", "timeout"})
_OF_CORE = ("family", "needs", "only_with", "planned", "planned_values", "further_choices")
_HOOK = "srv_arguments"
_NONE: Mapping[str, Argument] = MappingProxyType({})


class Declared(NamedTuple):
    """What one plugin declares: its NamedTuple, and the arguments of its fields."""

    declaration: type[NamedTuple]
    arguments: tuple[Argument, ...]


def extra_arguments(reserved: Collection[str]) -> Mapping[str, Argument]:
    """The arguments of all plugins by name. `reserved`: all names in core, which none may use. Raises PluginError."""
    plugins = hook_plugins()
    return _read(plugins, frozenset(reserved)) if plugins else _NONE


def group_of(plugin: HookPlugin) -> str:
    """The group of a plugin's arguments, which names their owner in listings."""
    return f"plugin {plugin.distribution}"


def arguments_of(extras: Mapping[str, Any], plugin: HookPlugin) -> Any:
    """The values of a plugin's arguments, as an instance of its declaration; None if it declares none.

    `extras`: those of a configuration.
    """
    declared = _declared(plugin)
    if declared is None:
        return None
    make: Callable[..., Any] = declared.declaration
    return make(**{argument.name: argument.kind.read(extras[argument.name]) for argument in declared.arguments})


def start_hooks(process: Literal["api", "engine"], extras: Mapping[str, Any]) -> Hooks:
    """The hooks of this process, set up with the plugins' arguments. Raises the PluginError of the first that fails."""
    hooks = Hooks(hook_plugins())
    hooks.setup(process, functools.partial(arguments_of, extras))
    return hooks


@functools.lru_cache(maxsize=1)
def _read(plugins: tuple[HookPlugin, ...], reserved: frozenset[str]) -> Mapping[str, Argument]:
    arguments: dict[str, Argument] = {}
    owners = dict.fromkeys((*reserved, *_RESERVED), "srv")
    for plugin in plugins:
        declared = _declared(plugin)
        plugin_arguments = declared.arguments if declared else ()
        for argument in plugin_arguments:
            for name in argument.names:
                for spelling in (name, f"no_{name}", name.removeprefix("no_")):  # --no-NAME sets a switch to false
                    if spelling in owners:
                        raise contested(f"argument {name}", [plugin.distribution, owners[spelling]])
            arguments[argument.name] = argument
            owners.update(dict.fromkeys(argument.names, plugin.distribution))
    return MappingProxyType(arguments)


@functools.cache
def _declared(plugin: HookPlugin) -> Declared | None:
    declaration: Any = plugin.call(_HOOK)
    if declaration is None:
        return None
    if not (isinstance(declaration, type) and hasattr(declaration, "_field_defaults")):
        raise plugin.error(_HOOK, f"returned {declaration!r}, not a class derived from NamedTuple")
    try:
        arguments = read_group(group_of(plugin), declaration)
    except (TypeError, NameError) as error:
        raise plugin.error(_HOOK, f"declares what is not an argument: {error}") from error
    for argument in arguments:
        _check(plugin, argument)
    return Declared(declaration, arguments)


def _check(plugin: HookPlugin, argument: Argument) -> None:
    """Refuse what is declared, but would have no effect outside core."""
    if bad := [name for name in argument.names if not _NAME.fullmatch(name)]:
        raise plugin.error(_HOOK, f"{bad[0]!r} is not a name of lowercase letters, digits and underscores")
    if of_core := [name for name in _OF_CORE if getattr(argument.arg, name)]:
        raise plugin.error(_HOOK, f"{argument.name} has {of_core[0]}, which only arguments of srv may have")

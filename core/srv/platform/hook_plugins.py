"""Loads the plugins of the group `srv.hooks`, and calls their hooks. Torch-free; must not know what a hook is for.

Each plugin has a pluggy manager of its own. One manager for all would stop at the first exception, and could not say
whose it was; here an exception switches off the plugin that raised it, and the other plugins and `srv` go on.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from srv.errors import PluginError, Refusal
from srv.platform.extensions import contested
from srv.platform.installed import Entry, entries

if TYPE_CHECKING:
    import pluggy

HOOK_GROUP = "srv.hooks"
Observer = Callable[[Any], None]
_NOT_CALLED_AT_ONCE = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
logger = logging.getLogger(__name__)


class HookPlugin:
    """One plugin. `hooks`: the names of those that it implements. `fault`: why it was switched off, or None."""

    def __init__(self, entry: Entry, manager: pluggy.PluginManager) -> None:
        self.name, self.distribution, self.version = entry.name, entry.distribution, entry.version
        self.fault: str | None = None
        self._callers = {
            name: caller
            for name, caller in vars(manager.hook).items()
            if not name.startswith("_") and caller.get_hookimpls()
        }
        self.hooks = tuple(sorted(self._callers))

    def caller(self, hook: str) -> Callable[..., Any] | None:
        """The plugin's implementation, called with keywords; None if it has none."""
        return self._callers.get(hook)

    def call(self, hook: str, **arguments: Any) -> Any:
        """The result of a hook that is called before anything is served; None if it is not implemented.

        Whatever it raises becomes a PluginError, except a Refusal.
        """
        caller = self.caller(hook)
        try:
            return None if caller is None else caller(**arguments)
        except Refusal:
            raise  # a plugin refuses the values of its arguments, with its own remedy
        except (Exception, SystemExit) as error:
            raise self.error(hook, f"raised {type(error).__name__}: {error}") from error

    def switch_off(self, hook: str, error: BaseException) -> None:
        """None of its hooks is called again in this process."""
        self.fault = f"{hook} raised {type(error).__name__}: {error}"
        logger.error(
            "plugin %s (%s): %s; it is switched off until this process ends",
            self.name,
            self.distribution,
            self.fault,
            exc_info=error,
        )

    def error(self, hook: str, reason: str, code: str = "contract") -> PluginError:
        return _error(self.distribution, f"{self.name}.{hook}", reason, code)


class Hooks:
    """The plugins of one process, and what calls them."""

    def __init__(self, plugins: Sequence[HookPlugin] = ()) -> None:
        self.plugins = tuple(plugins)

    def bind(self, hook: str) -> Observer | None:
        """A function that passes an event to every plugin; None if no plugin observes it, so that nothing is made."""
        callers = [(plugin, caller) for plugin in self.plugins if (caller := plugin.caller(hook)) is not None]
        return functools.partial(_observe, hook, callers) if callers else None

    def setup(self, process: Literal["api", "engine"], arguments: Callable[[HookPlugin], Any]) -> None:
        """Call `srv_setup` of every plugin, with the values of its arguments. Raises the PluginError of the first."""
        if self.plugins:
            from srv.hooks import Setup

            for plugin in self.plugins:
                plugin.call("srv_setup", setup=Setup(process=process, arguments=arguments(plugin)))

    def collect(self, hook: str) -> list[tuple[HookPlugin, Any]]:
        """The results other than None, by plugin. Raises the PluginError of the first that fails."""
        results = [(plugin, plugin.call(hook)) for plugin in self.plugins]
        return [(plugin, result) for plugin, result in results if result is not None]

    def status(self) -> list[dict[str, Any]]:
        """The plugins as JSON values, for /get_server_info."""
        return [
            {
                "plugin": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "hooks": list(plugin.hooks),
                "switched_off": plugin.fault,
            }
            for plugin in self.plugins
        ]

    def faults(self) -> dict[str, str]:
        """Why plugins were switched off, by plugin."""
        return {plugin.name: plugin.fault for plugin in self.plugins if plugin.fault is not None}


NO_HOOKS = Hooks()


def _observe(hook: str, callers: Sequence[tuple[HookPlugin, Callable[..., Any]]], event: Any) -> None:
    for plugin, caller in callers:
        if plugin.fault is None:
            try:
                caller(event=event)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - SystemExit and CancelledError too: it harms only itself
                plugin.switch_off(hook, error)


def hook_plugins() -> tuple[HookPlugin, ...]:
    """The installed plugins, loaded once per process. Raises the PluginError of the first that cannot be used."""
    hook_entries = entries(HOOK_GROUP)
    return _load(hook_entries, tuple(sys.path)) if hook_entries else ()


@functools.lru_cache(maxsize=1)
def _load(entries_: tuple[Entry, ...], import_path: tuple[str, ...]) -> tuple[HookPlugin, ...]:
    """Cached per import path. If a plugin cannot be used, nothing is cached."""
    return load(entries_)


def load(entries_: tuple[Entry, ...]) -> tuple[HookPlugin, ...]:
    """These plugins, made anew. Raises the PluginError of the first that cannot be used."""
    from srv.platform.found_by_stevedore import load_all  # slow to import; most installations have no such plugin

    owners: dict[str, list[str]] = {}
    for entry in entries_:
        owners.setdefault(entry.name, []).append(entry.distribution)
    for name, claiming in owners.items():
        if len(claiming) > 1:
            raise contested(f"hooks plugin {name}", claiming)
    try:
        loaded = load_all(HOOK_GROUP, entries_)
    except PluginError as error:
        if error.code != "impure":
            raise
        remedy = "Move that import into the hook that needs it"
        raise PluginError(error.distribution, error.member, error.reason, remedy, error.code) from error
    return tuple(_registered(extension.entry, extension.extension) for extension in loaded)


def _registered(entry: Entry, plugin: Any) -> HookPlugin:
    """Register a plugin with its own manager, or raise the PluginError that says which of its hooks is wrong."""
    import pluggy

    from srv import hooks

    if isinstance(plugin, type):
        try:
            plugin = plugin()
        except (Exception, SystemExit) as error:
            reason = f"creating it raised {type(error).__name__}: {error}"
            raise _error(entry.distribution, entry.value, reason) from error
    manager = pluggy.PluginManager("srv")
    manager.add_hookspecs(hooks)
    hook_names = tuple(name for name in vars(manager.hook) if not name.startswith("_"))
    try:
        manager.register(plugin, entry.name)
    except pluggy.PluginValidationError as error:
        raise _error(entry.distribution, entry.name, " ".join(str(error).split()), "signature") from error
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        reason = f"{error}; the hooks of this version of srv are {', '.join(sorted(hook_names))}"
        raise _error(entry.distribution, entry.name, reason, "unknown_member") from error
    hook_plugin = HookPlugin(entry, manager)
    _check_implementations(hook_plugin, plugin, manager, hook_names)
    return hook_plugin


def _check_implementations(
    hook_plugin: HookPlugin, plugin: Any, manager: pluggy.PluginManager, hooks: Sequence[str]
) -> None:
    """Refuse what pluggy accepts, but `srv` would never call or await."""
    for name in hooks:
        implementations = getattr(manager.hook, name).get_hookimpls()
        if not implementations and callable(getattr(plugin, name, None)):
            raise hook_plugin.error(name, "is not marked with srv.hooks.hookimpl")
        for implementation in implementations:
            if implementation.wrapper or implementation.hookwrapper:
                raise hook_plugin.error(name, "wraps other implementations, of which there are none", "signature")
            if any(check(implementation.function) for check in _NOT_CALLED_AT_ONCE):
                raise hook_plugin.error(name, "is asynchronous or a generator; hooks are plain functions", "signature")
    if not hook_plugin.hooks:
        reason = "implements no hook: no function that srv.hooks.hookimpl marks has the name of one"
        raise _error(hook_plugin.distribution, hook_plugin.name, reason)


def _error(distribution: str, member: str, reason: str, code: str = "contract") -> PluginError:
    remedy = f"Update or uninstall {distribution}; docs/hooks.md says what a plugin consists of"
    return PluginError(distribution, member, reason, remedy, code)

"""Forward hooks: functions of installed packages that are called with the output of selected layers. Torch-free.

    [project.entry-points."srv.forward_hooks"]
    norms = "my_package:NORMS"                   NORMS = ForwardHook("norms", make)

    --forward-hooks '[{"hook": "norms", "target_modules": ["model.layers.*.mlp"], "config": {"file": "norms.txt"}}]'

`make(config)` returns a function (module name, inputs, output) whose result replaces the output, unless it is None.
Code comes from installed packages only: never from a request, and not by a path on the command line either. Owns the
form of the argument. `srv.worker.module_calls` calls the functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from srv.platform.extensions import Extensions

GROUP = "srv.forward_hooks"
AfterModule = Callable[[str, tuple[Any, ...], Any], Any]
_KEYS = {"hook": str, "target_modules": list, "config": dict}


class ForwardHook(NamedTuple):
    """A hook that a package offers. `make`: from the configuration on the command line to the function."""

    name: str
    make: Callable[[Mapping[str, Any]], AfterModule]


HOOKS = Extensions(GROUP, ForwardHook, "forward hook", "docs/hooks.md", types={"name": str}, functions=("make",))


class WantedHook(NamedTuple):
    """One entry of the argument. `modules`: patterns of `fnmatch` for the names of modules."""

    hook: str
    modules: tuple[str, ...]
    config: Mapping[str, Any]


def read_hooks(text: str) -> list[WantedHook]:
    """The entries of the argument. Raises ValueError, which says what is wrong."""
    entries: object = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError("it must be a JSON list")
    hooks = []
    for number, entry in enumerate(entries):
        where = f"entry {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} must be an object")
        for key, value in entry.items():
            if key not in _KEYS:
                keys = ", ".join(_KEYS)
                raise ValueError(f"{where} has the key {key!r}, which is none of {keys}")
            if not isinstance(value, _KEYS[key]):
                raise ValueError(f"{key} of {where} must be of type {_KEYS[key].__name__}")
        modules = entry.get("target_modules", [])
        if "hook" not in entry or not modules or not all(isinstance(module, str) for module in modules):
            raise ValueError(f"{where} needs hook, and target_modules with the names of modules")
        if entry["hook"] not in HOOKS.names():
            offered = ", ".join(HOOKS.names()) or "none"
            raise ValueError(f"no installed package has a forward hook called {entry['hook']!r} (installed: {offered})")
        hooks.append(WantedHook(entry["hook"], tuple(modules), entry.get("config", {})))
    return hooks


def make_hook(hook_request: WantedHook) -> AfterModule:
    """The function of a wanted hook. Raises PluginError if its package is at fault."""
    hook = HOOKS.find(hook_request.hook)
    assert hook is not None
    function = HOOKS.call(hook_request.hook, "make", hook.make, hook_request.config)
    if not callable(function):
        raise HOOKS.error_in(
            HOOKS.provider(hook_request.hook), f"{hook_request.hook}.make", f"returned {function!r}, no function"
        )
    return function

"""The contract checks of targets and ops, of a platform or a backend; part of `srv.platform.checks`. Torch-free."""

from __future__ import annotations

import re
from typing import Protocol

from srv.platform.facts import OpSpec

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Requirements(Protocol):
    """What `srv.platform.checks` requires of a plugin; each method raises a PluginError that names it."""

    def require(self, holds: bool, member: str, reason: str, remedy: str) -> None: ...
    def require_type(self, value: object, kind: type, member: str) -> None: ...
    def require_text(self, value: object, member: str) -> None: ...
    def require_signature(self, function: object, member: str, *parameters: str) -> None: ...


def check_target(plugin: Requirements, target: object, where: str) -> None:
    """The target of a backend is "module:class"."""
    plugin.require_type(target, str, where)
    remedy = 'Write it as "package.module:Class"'
    plugin.require(_TARGET.fullmatch(str(target)) is not None, where, f"is {target!r}", remedy)


def check_ops(ops: object, plugin: Requirements, member: str = "PlatformFacts.ops") -> None:
    """Each is an OpSpec, with a name of its own among those of its op, of which fallbacks come last."""
    plugin.require_type(ops, tuple, member)
    assert isinstance(ops, tuple)
    seen: set[tuple[str, str]] = set()
    fallbacks: dict[str, str] = {}
    for index, spec in enumerate(ops):
        where = f"{member}[{index}]"
        plugin.require_type(spec, OpSpec, where)
        for name in ("op", "name"):
            plugin.require_text(getattr(spec, name), f"{where}.{name}")
        plugin.require_type(spec.target, str, f"{where}.target")
        for name in ("batch_invariant", "fallback"):
            plugin.require_type(getattr(spec, name), bool, f"{where}.{name}")
        plugin.require_signature(spec.check, f"{where}.check", "device: DeviceFacts", "call: OpCall")
        key = (spec.op, spec.name)
        remedy = "Give each implementation of an op its own name"
        plugin.require(key not in seen, where, f"names {spec.name} of {spec.op} twice", remedy)
        seen.add(key)
        if spec.fallback:
            fallbacks.setdefault(spec.op, spec.name)
        after = fallbacks.get(spec.op)
        remedy = "List the fallbacks of an op after its faster implementations"
        plugin.require(spec.fallback or after is None, where, f"{spec.name} comes after the fallback {after}", remedy)

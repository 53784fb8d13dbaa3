"""Binding ops: from a platform's list of implementations to the callables a model's layers hold.

Binding happens once, when a layer is built; a call afterwards is a plain function call.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from srv.errors import PluginError
from srv.platform.interface import OpArgs, OpImpl


class Ops:
    """The ops of one platform. `bound` remembers every choice, for `diagnose` and the support matrix."""

    def __init__(self, platform: str, impls: Sequence[OpImpl]) -> None:
        self._platform = platform
        self._impls = tuple(impls)
        self.bound: dict[tuple[str, str], str] = {}

    def bind(self, op: str, args: OpArgs) -> Callable[..., Any]:
        """The first implementation that supports these arguments; PluginError with all reasons if none."""
        reasons: list[str] = []
        for impl in self._impls:
            if impl.op != op:
                continue
            against = impl.supports_args(args)
            if against is None:
                self.bound[(op, str(args.dtype))] = impl.name
                target = impl.target
                return pkgutil.resolve_name(target) if isinstance(target, str) else target
            reasons.append(f"{impl.name}: {against}")
        raise PluginError(
            self._platform,
            f"op {op}",
            "; ".join(reasons) or "the platform brings no implementation",
            f"It must bring an OpImpl for {op} that supports {args.dtype} with sizes {dict(args.sizes)}.",
        )

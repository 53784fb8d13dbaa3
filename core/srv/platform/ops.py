"""Op binding: chooses, from a platform's list of implementations, the callables that a model's layers hold.

Binding happens once, when a layer is built; a call afterwards is a plain function call.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from srv.errors import PluginError
from srv.platform.interface import OpArgs, OpImpl


class Ops:
    """The op implementations of one platform."""

    def __init__(self, platform: str, impls: Sequence[OpImpl]) -> None:
        self._platform = platform
        self._impls = tuple(impls)

    def _of(self, op: str) -> Iterator[OpImpl]:
        return (impl for impl in self._impls if impl.op == op)

    def offers(self, op: str, args: OpArgs) -> bool:
        """Whether `bind` finds an implementation, for layers that can do without the op."""
        return any(impl.supports_args(args) is None for impl in self._of(op))

    def bind(self, op: str, args: OpArgs) -> Callable[..., Any]:
        """The first implementation that supports these arguments; PluginError with all reasons if none does."""
        reasons: list[str] = []
        for impl in self._of(op):
            reason = impl.supports_args(args)
            if reason is None:
                target = impl.target
                return pkgutil.resolve_name(target) if isinstance(target, str) else target
            reasons.append(f"{impl.name}: {reason}")
        raise PluginError(
            self._platform,
            f"op {op}",
            "; ".join(reasons) or "the platform brings no implementation",
            f"It must bring an OpImpl for {op} that supports {args.dtype} with sizes {dict(args.sizes)}.",
        )

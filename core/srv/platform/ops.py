"""Op binding: chooses, from a platform's list of implementations, the callables that a model's layers hold.

Binding happens once, when a layer is built; a call afterwards is a plain function call.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from srv.errors import PluginError
from srv.platform.experts import EXPERT_OPS, MOE_SLOT
from srv.platform.facts import DeviceFacts, OpCall, OpSpec
from srv.platform.interface import OpArgs, OpImpl
from srv.platform.op_choice import NOT_INVARIANT, not_named, op_key, too_coarse


def implementations(
    specs: Iterable[OpSpec], device: DeviceFacts, targets: Mapping[tuple[str, str], Callable[..., Any]] | None = None
) -> tuple[OpImpl, ...]:
    """The `Platform.ops` that follow from the specs of a platform's facts: those with a target.

    `targets`: callables of the live platform, by op and name.
    """
    added_targets = targets or {}
    return tuple(
        OpImpl(
            spec.op,
            spec.name,
            partial(_supports, spec, device),
            added_targets.get((spec.op, spec.name), spec.target),
            spec.batch_invariant,
            spec.rounds,
        )
        for spec in specs
        if spec.target or (spec.op, spec.name) in added_targets
    )


def _supports(spec: OpSpec, device: DeviceFacts, args: OpArgs) -> str | None:
    return spec.check(device, call_of(args))


def call_of(args: OpArgs) -> OpCall:
    return OpCall(str(args.dtype).removeprefix("torch."), args.sizes)


class Ops:
    """The op implementations of one platform. `batch_invariant`: those that do not declare it cannot be bound.

    `experts`: the backend of experts, whose implementations alone can be bound for these; "" for any. `named`: the
    values of arguments that name the implementation of an op, by op. `full`: those that round activations cannot be
    bound.
    """

    def __init__(
        self,
        platform: str,
        impls: Sequence[OpImpl],
        *,
        batch_invariant: bool = False,
        experts: str = "",
        named: Mapping[str, str] = MappingProxyType({}),
        full: bool = False,
    ) -> None:
        self._platform = platform
        self._impls = tuple(impls)
        self._batch_invariant = batch_invariant
        self._experts = experts
        self._named, self._full = named, full
        self._bound: dict[str, str] = {}

    @property
    def bound(self) -> Mapping[str, str]:
        """The name of the implementation that `bind` returned (or of the layers' own), by `op_key`."""
        return MappingProxyType(self._bound)

    def offers(self, op: str, args: OpArgs) -> bool:
        """Whether `bind` finds an implementation, for layers that can do without the op."""
        return self._find(op, args)[0] is not None

    def _find(self, op: str, args: OpArgs) -> tuple[OpImpl | None, list[str]]:
        """The first implementation that can be bound; the reasons why those before it cannot."""
        reasons: list[str] = []
        for impl in self._impls:
            if impl.op == op:
                reason = self._reason(impl, args)
                if reason is None:
                    return impl, reasons
                reasons.append(f"{impl.name}: {reason}")
        return None, reasons

    def _reason(self, impl: OpImpl, args: OpArgs) -> str | None:
        """Why an implementation cannot be bound; None if it can."""
        if self._experts and impl.op in EXPERT_OPS and impl.name != self._experts:
            return f"{MOE_SLOT} is {self._experts}"
        if (unnamed := not_named(impl.op, impl.name, self._named)) is not None:
            return unnamed
        if self._batch_invariant and not impl.batch_invariant:
            return NOT_INVARIANT
        if (coarse := too_coarse(impl.rounds, full=self._full)) is not None:
            return coarse
        return impl.supports_args(args)

    def note_own(self, op: str, args: OpArgs, name: str) -> None:
        """Layers that can do without the op compute it themselves, by what has this name."""
        call = call_of(args)
        self._bound[op_key(op, call.dtype, call.sizes)] = name

    def name_of(self, op: str, args: OpArgs) -> str:
        """The name of the implementation that `bind` returns; "" if there is none."""
        impl, _ = self._find(op, args)
        return "" if impl is None else impl.name

    def bind(self, op: str, args: OpArgs) -> Callable[..., Any]:
        """The first implementation that supports these arguments; PluginError with all reasons if none does."""
        impl, reasons = self._find(op, args)
        if impl is None:
            raise PluginError(
                self._platform,
                f"op {op}",
                "; ".join(reasons) or "the platform brings no implementation",
                f"It must bring an OpImpl for {op} that supports {args.dtype} with sizes {dict(args.sizes)}.",
            )
        call = call_of(args)
        self._bound[op_key(op, call.dtype, call.sizes)] = impl.name
        return pkgutil.resolve_name(impl.target) if isinstance(impl.target, str) else impl.target

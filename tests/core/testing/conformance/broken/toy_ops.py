"""The toy platform with other ops: one replaced, one removed, all of them for fewer dtypes, or those of GGUF."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toy_variant import manifest

from srv.platform.facts import OpSpec
from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    from srv.platform.facts import DeviceFacts, OpCall
    from srv.platform.interface import OpArgs, OpImpl
    from srv.platform.manifest import Manifest
    from srv_toy_device.platform import ToyPlatform

Change = Callable[["OpImpl"], "OpImpl | None"]
Alter = Callable[[type["ToyPlatform"]], type["ToyPlatform"]]


def with_op(op: str, function: Callable[..., Any]) -> Alter:
    """Replace one op with `function`, which declares support for all arguments."""

    def change(impl: OpImpl) -> OpImpl:
        return replace(impl, supports_args=lambda args: None, target=function) if impl.op == op else impl

    return _with_ops(change)


def without_op(op: str) -> Alter:
    return _with_ops(lambda impl: None if impl.op == op else impl)


def without_dtype(dtype: str) -> Alter:
    """No op supports `dtype`."""

    def change(impl: OpImpl) -> OpImpl:
        def supports(args: OpArgs) -> str | None:
            return f"{dtype} has no kernel" if str(args.dtype) == f"torch.{dtype}" else impl.supports_args(args)

        return replace(impl, supports_args=supports)

    return _with_ops(change)


def _with_ops(change: Change) -> Alter:
    def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
        class Altered(toy):  # type: ignore[valid-type, misc]
            @property
            def ops(self) -> tuple[OpImpl, ...]:
                changed = [change(impl) for impl in super().ops]
                return tuple(impl for impl in changed if impl is not None)

        return Altered

    return platform


def with_blocks(name: str, op: str, function: Callable[..., Any]) -> Manifest:
    """Platform `name` with the GGUF ops of srv_kernels.reference, except `op`, which is `function`."""
    return with_capability(name, "gguf_blocks", ("linear_gguf", "rows_gguf"), op, function)


def with_capability(
    name: str, capability: str, names: tuple[str, ...], op: str, function: Callable[..., Any]
) -> Manifest:
    """Platform `name` with a capability and its ops from srv_kernels.reference, except `op`, which is `function`."""

    def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
        from srv.platform.interface import OpImpl

        class Altered(toy):  # type: ignore[valid-type, misc]
            @property
            def ops(self) -> tuple[OpImpl, ...]:
                right = {op_name: f"srv_kernels.reference:{op_name}" for op_name in names}
                targets: dict[str, Any] = {**right, op: function}
                return (
                    *super().ops,
                    *(OpImpl(op_name, "reference", _any, target) for op_name, target in targets.items()),
                )

        return Altered

    def capabilities(device: DeviceFacts) -> frozenset[str]:
        return FACTS.capabilities(device) | {capability}

    ops = (
        *FACTS.ops,
        *(OpSpec(op_name, "reference", _always, f"srv_kernels.reference:{op_name}") for op_name in names),
    )
    return manifest(name, platform=platform, facts={"capabilities": capabilities, "ops": ops})


def _any(args: OpArgs) -> str | None:
    return None


def _always(device: DeviceFacts, call: OpCall) -> str | None:
    return None

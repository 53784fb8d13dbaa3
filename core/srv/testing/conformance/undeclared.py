"""L2: features that work although the plugin does not declare them: ops of a capability, chunks, shared pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from srv.platform.capabilities import OPS_OF
from srv.testing.conformance import attention, ops
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Undeclared


def features(kit: Kit) -> str:
    """Capabilities that are not declared, and whose checks pass. It never fails."""
    tried = dict(_undeclared(kit))
    working = [name for name, checks in tried.items() if all(_works(check, kit) for check in checks)]
    if working:
        raise Undeclared(
            f"the checks of {', '.join(working)} pass, which the plugin does not declare",
            f"Add {', '.join(working)} to the capabilities if the whole platform supports it.",
        )
    return f"none of {', '.join(tried)} works" if tried else "all that can be tried is declared"


def _undeclared(kit: Kit) -> Iterator[tuple[str, list[Callable[[Kit], object]]]]:
    of_attention: dict[str, list[Callable[[Kit], object]]] = {
        "chunked_prefill": [attention.extend],
        "prefix_cache": [attention.sharing, attention.same_step],
    }
    of_ops = {name: [_op_check(op) for op in op_names] for name, op_names in OPS_OF.items()}
    for name, checks in (of_attention | of_ops).items():
        if name not in kit.capabilities:
            yield name, checks


def _op_check(op: str) -> Callable[[Kit], object]:
    return lambda kit: ops.check(kit, op)


def _works(check: Callable[[Kit], object], kit: Kit) -> bool:
    try:
        check(kit)
    except Exception:  # noqa: BLE001 - what is not declared may fail in any way
        return False
    return True

"""Resolution of the arguments that plugins declare: the user's strongest statement, or else the declared default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from srv.args.spec import Argument
from srv.args.statement import Layer, Provenance, Statement, UserStatement
from srv.errors import Rejection

GENERIC_REASON = "generic default"


class ResolvedExtras(NamedTuple):
    """`values`: JSON values by argument. `provenance`: by argument, like that of core's."""

    values: Mapping[str, Any]
    provenance: Mapping[str, Provenance]
    rejections: Sequence[Rejection]


def resolve_extras(statements: Sequence[UserStatement], arguments: Mapping[str, Argument]) -> ResolvedExtras:
    """Resolve each of `arguments`; statements about others are not looked at."""
    values: dict[str, Any] = {}
    provenance: dict[str, Provenance] = {}
    rejections: list[Rejection] = []
    for name, argument in arguments.items():
        candidates = [Statement(name, argument.default, Layer.GENERIC, argument.group, GENERIC_REASON)]
        for statement in [statement for statement in statements if statement.argument == name]:
            if error := argument.validation_error(statement.value):
                remedy = f"See `srv args explain {name}`."
                shown = argument.show(statement.value)
                rejections.append(Rejection("bad_value", name, shown, statement.source, f"it {error}", remedy))
            else:
                reason = f"set by {statement.source}"
                candidates.append(
                    Statement(name, statement.value, Layer.USER, statement.source, reason, statement.origin)
                )
        winner, *others = sorted(candidates, key=lambda statement: (statement.layer, statement.origin), reverse=True)
        values[name] = argument.kind.dump(winner.value)
        provenance[name] = Provenance(name, winner.value, winner.owner, winner.layer, winner.reason, tuple(others))
    return ResolvedExtras(values, provenance, rejections)

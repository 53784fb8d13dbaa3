"""Arguments that name the implementation of an op. A name that the platform does not have is refused.

Must not know any implementation by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from srv.args.config import ARGUMENTS, Config
from srv.args.spec import nearest
from srv.args.statement import Statement
from srv.errors import Rejection
from srv.platform.facts import OpSpec
from srv.platform.op_choice import NAMED_BY, argument_names


def named_implementations(config: Config) -> Mapping[str, str]:
    """The names of implementations, or "auto", by op."""
    return {op: config.get(name) for op, name in NAMED_BY.items()}


def unknown_implementations(platform: str, ops: Sequence[OpSpec], user: Mapping[str, Statement]) -> Iterator[Rejection]:
    """A rejection for each of the user's winning statements that names none. `ops`: those of the platform."""
    for op, name in NAMED_BY.items():
        names = argument_names(ops, op)
        if name not in user or user[name].value in names:
            continue
        closest = nearest(user[name].value, names)
        yield Rejection(
            "unknown_backend",
            name,
            ARGUMENTS[name].show(user[name].value),
            user[name].owner,
            f"platform {platform} has no implementation of {op} of that name",
            (f"Did you mean {closest}? " if closest else "") + f"Available: {', '.join(names) or 'none'}.",
        )

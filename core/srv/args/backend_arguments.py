"""Arguments that backends read (`Arg.read_by`) or require, as the declarations and the backends' specs say.

A user's value is refused if no chosen backend reads it, or if the user overrides it everywhere: it would be accepted
and ignored. This module must not know any argument or backend by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from srv.args.config import ARGUMENTS
from srv.args.statement import BackendChoice, Statement
from srv.errors import PluginError, Rejection
from srv.platform.facts import BackendSpec


def unread_arguments(user: Mapping[str, Statement], chosen: Mapping[str, BackendChoice]) -> Iterator[Rejection]:
    """A rejection for each of the user's winning statements, by argument, that none of the chosen backends reads."""
    if not chosen:
        return  # the choice has failed, and says why
    for name, statement in user.items():
        argument = ARGUMENTS[name]
        family = argument.arg.read_by
        if family is None or statement.value == argument.default:
            continue
        specs = {choice.spec.name: choice.spec for choice in chosen.values() if choice.family == family}
        if not specs or any(name in spec.arguments for spec in specs.values()):
            continue  # a model that needs no backend of the family is what a constraint of the argument names
        backends = " and ".join(f"{family} backend {spec}" for spec in specs)
        yield Rejection(
            "backend_ignores",
            name,
            argument.show(statement.value),
            statement.owner,
            f"{backends} {'do' if len(specs) > 1 else 'does'} not read it",
            f"Leave {argument.flag} out, or choose a backend that reads it.",
        )


def overridden_arguments(user: Mapping[str, Statement], slots: Iterable[Sequence[str]]) -> Iterator[Rejection]:
    """A rejection for each of the user's winning statements that the user overrides wherever it would choose a backend.

    `slots`: for each, the arguments that choose its backend, the most specific first.
    """
    slots = tuple(slots)
    for name, statement in user.items():
        chosen_by = [next(key for key in slot if key in user) for slot in slots if name in slot]
        if not chosen_by or any(user[key].value == statement.value for key in chosen_by):
            continue
        argument = ARGUMENTS[name]
        reason = f"{' and '.join(chosen_by)} {'override' if len(chosen_by) > 1 else 'overrides'} it"
        yield Rejection("inert", name, argument.show(statement.value), statement.owner, reason, "Leave it out.")


def check_declared(spec: BackendSpec, family: str, owner: str) -> None:
    """Raise PluginError if the spec names no argument of srv, or one that is read by another family alone."""
    for name in spec.arguments:
        if name in ARGUMENTS and ARGUMENTS[name].arg.read_by in (None, family):
            continue
        reason = f"it reads {name}, which is not an argument that {family} backends may read"
        raise PluginError(owner, f"{family} backend {spec.name}", reason, "Remove it from BackendSpec.arguments.")


def check_requirement(name: str, values: Sequence[Any], platform: str, member: str) -> None:
    """PluginError if a backend requires what is no value of an argument."""
    owner = f"platform {platform}"
    if name not in ARGUMENTS:
        reason = f"it requires {name}, which is not an argument"
        raise PluginError(owner, member, reason, "It must name arguments of srv.")
    if not values:
        raise PluginError(owner, member, f"it allows no value of {name}", "It must return Unfit instead.")
    for value in values:
        error = ARGUMENTS[name].validation_error(value)
        if error:
            reason = f"it requires {name} = {value!r}, which {error}"
            raise PluginError(owner, member, reason, "Report this to its authors.")


def requirement_text(name: str, values: Sequence[Any]) -> str:
    """An argument with its allowed values: "page_size 32 or 64"."""
    shown = [ARGUMENTS[name].show(value) for value in values]
    return f"{name} {' or '.join(shown)}"

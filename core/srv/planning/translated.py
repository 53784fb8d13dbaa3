"""Which arguments of a translated command line a launch would refuse, by the same rules.

Must not know any engine's flags: `srv.args.dialects` translates them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from srv.args.command_line import bad_value, read_translation
from srv.args.config import argument_named
from srv.args.deprecated import translate
from srv.args.dialects import Translation
from srv.args.statement import UserInput
from srv.errors import ModelError, PlatformUnavailable, Refusal, Rejection
from srv.models.locate import locate
from srv.models.options import ReadOptions
from srv.models.read import read_facts
from srv.planning.launchable import check_launch, check_model
from srv.planning.resolution import argument_fault, model_fault, read_options, resolve_arguments
from srv.planning.target import Target, find_target
from srv.specs import ModelFacts

UNCHECKED_DEVICE = "a launch may refuse more: name the device with --device NAME:PROFILE to have its rules checked"
UNCHECKED_MODEL = "a launch may refuse more: the files of the model are not on this machine"


def bad_values(translation: Translation) -> list[Rejection]:
    """Refusals of invalid values."""
    statements, refused = read_translation(replace(translation, rejections=()))
    with_arguments = ((statement, argument_named(statement.argument)) for statement in statements)
    invalid = [
        bad_value(argument, argument.show(statement.value), statement.source, f"it {error}")
        for statement, argument in with_arguments
        if (error := argument.validation_error(statement.value)) is not None
    ]
    return [*refused, *invalid]


class Verdict(NamedTuple):
    """What a launch refuses, and what could not be asked."""

    refusals: list[Rejection]
    unchecked: list[str]


def launch_verdict(translation: Translation, device: str | None) -> Verdict:
    """Refusals of valid values, by the rules of a launch.

    The rules of a platform apply only if the command line or `device` names it with its profile (or it is available
    here), those about a model only if its files are on this machine: nothing is downloaded.
    """
    statements, _ = read_translation(replace(translation, rejections=()))
    valid = [
        statement
        for statement in statements
        if argument_named(statement.argument).validation_error(statement.value) is None
    ]
    translated, contradictions, _ = translate(valid)
    user = UserInput(tuple(translated))
    faults, target, model = list(contradictions), None, None
    try:
        target = _target(user, device)
    except Refusal as refusal:
        faults += refusal.rejections
    except PlatformUnavailable as error:
        faults.append(argument_fault(user, "device", error.code, error.reason, error.remedy))
    try:
        model = _local_model(user.value("model_path"), read_options(user))
    except ModelError as error:
        faults.append(model_fault(user, error))
    unchecked = [] if target is not None or faults else [UNCHECKED_DEVICE]
    unchecked += [] if model is not None or faults else [UNCHECKED_MODEL]
    try:
        resolved = resolve_arguments(user, target, model)
    except Refusal as refusal:
        return Verdict([*faults, *refusal.rejections], unchecked)
    if model is not None:
        refusals = (
            check_model(model, resolved) if target is None else check_launch(target, model, resolved, None).refusals
        )
        faults += refusals
    return Verdict(faults, unchecked)


def _target(user: UserInput, device: str | None) -> Target | None:
    """The named device; None without a name, and for a platform's name alone if this machine has no such device.

    `device`: of the translation itself; it adds the profile if the command line names the platform alone.
    """
    request = user.value("device") or device
    if device is not None and request == device.partition(":")[0]:
        request = device
    try:
        return None if request is None else find_target(request)
    except Refusal as refusal:
        if refusal.rejections[0].code != "profile_needed":
            raise
        return None


def _local_model(path: str | None, options: ReadOptions) -> ModelFacts | None:
    """The facts of a model whose files are on this machine; None without files. Raises ModelError."""
    return read_facts(locate(path), options) if path is not None and Path(path).expanduser().exists() else None

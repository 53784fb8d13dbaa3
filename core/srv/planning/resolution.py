"""Resolution before anything starts: the user's arguments, a platform and the model's facts become a configuration.

Torch-free. `srv launch` resolves for this machine, `srv plan` for any device; a refusal comes before weights are read.
The facts of a model on a hub come from headers; a launch downloads it once nothing is refused.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from srv.args.config import ARGUMENTS
from srv.args.resolve import resolve
from srv.args.statement import Resolved, UserInput
from srv.errors import ModelError, PlatformUnavailable, Refusal, Rejection, as_sentence
from srv.models import hub
from srv.models.checkpoints.safetensors_header import forget_headers
from srv.models.checkpoints.third_party import described
from srv.models.facts.special_layers import mixture
from srv.models.inspection import Inspection, inspect_model
from srv.models.layers.rope_config import long_rope_length
from srv.models.locate import locate, located, on_hub
from srv.models.options import ReadOptions
from srv.models.read import read_facts
from srv.models.remote_code import code_files, files_of, runs_code, tokenizer_classes
from srv.models.score_template import read_score_template
from srv.planning.expert_location import TRIVIAL, ExpertLocation, mixtures_of, read_location
from srv.planning.kernels import KernelPlan
from srv.planning.launchable import LaunchCheck, check_launch
from srv.planning.target import Target, this_machine
from srv.planning.weights import quantization_method
from srv.platform import numa
from srv.platform.capabilities import missing_capability
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import Manifest
from srv.platform.op_choice import NAMED_BY, TORCH_NATIVE, argument_names
from srv.specs import ModelFacts

_REDUNDANT = 1 << 14  # places in a layer that a plan writes out beside one for each expert, at most

FindTarget = Callable[[str | None, str], Target]
FindModel: TypeAlias = "Callable[[UserInput], AbstractContextManager[FoundModel | None]]"


class ResolvedPlan(NamedTuple):
    """The user's arguments, resolved for a target. `model` is None only if none was needed.

    `check`: whether a launch would get as far as the weights. `remote`: the model is on a hub, and its facts come from
    headers. `experts`: what --init-expert-location says of the model's experts; None if it has none.
    """

    target: Target
    model: ModelFacts | None
    resolved: Resolved
    notes: tuple[str, ...]
    check: LaunchCheck
    remote: bool = False
    experts: ExpertLocation | None = None


class LaunchContext(NamedTuple):
    """Everything that a launch on this machine needs. `notes` are logged as warnings."""

    manifest: Manifest
    device: DeviceFacts
    model: ModelFacts
    resolved: Resolved
    reason: str
    notes: tuple[str, ...]
    kernels: KernelPlan = KernelPlan(())

    @property
    def platform(self) -> str:
        return self.manifest.name


def resolve_launch(user: UserInput, find_target: FindTarget = this_machine) -> LaunchContext:
    """Resolve for this machine, then download the model. Refusal with everything that conflicts with a launch."""
    try:
        return _resolve_launch(user, find_target)
    finally:
        forget_headers()  # this process is going to serve, and ranks have their own


def _resolve_launch(user: UserInput, find_target: FindTarget) -> LaunchContext:
    plan = resolve_plan(user, find_target, examine_local=False)
    target, model, resolved, check = plan.target, plan.model, plan.resolved, plan.check
    _raise_refusals(check)
    if plan.remote:
        try:
            options = read_options(user)
            path = locate(user.value("model_path"), user.value("revision"), options.remote_code, _cache(user))
            model = read_facts(path, options)
        except ModelError as error:
            raise Refusal([model_fault(user, error)]) from error
        resolved = resolve_arguments(user, target, model)
        check = check_launch(target, model, resolved, None)
        _raise_refusals(check)
    assert model is not None
    notes = tuple(dict.fromkeys((*plan.notes, *check.notes)))
    return LaunchContext(target.manifest, target.device, model, resolved, target.reason, notes, check.kernels)


def _raise_refusals(check: LaunchCheck) -> None:
    if check.refusals:
        raise Refusal(check.refusals)


def resolve_plan(
    user: UserInput,
    find_target: FindTarget,
    *,
    find_model: FindModel | None = None,
    model_needed: bool = True,
    on_this_host: bool = True,
    carry: bool = False,
    examine_local: bool = True,
) -> ResolvedPlan:
    """Find device and model and resolve. Refusal with everything that can be checked at once.

    `find_target(text of --device or None, who set it)` raises Refusal or PlatformUnavailable. `find_model`: None is
    `find_the_model`, with `model_needed`. `on_this_host`: the engine is going to run here, so that the NUMA nodes that
    it is bound to have to exist. `carry`: as in `srv.args.resolve.resolve`. `examine_local`: ask transformers for a
    local model without native layers.
    """
    faults: list[Rejection] = list(user.rejections)
    target = found_model = None
    code: Sequence[str] = ()
    try:
        target = find_target(user.value("device"), _source(user, "device"))
    except Refusal as refusal:
        faults += refusal.rejections
    except PlatformUnavailable as error:
        faults.append(argument_fault(user, "device", error.code, error.reason, error.remedy))
    with ExitStack() as stack:
        try:
            found_model = stack.enter_context(find_model(user) if find_model else find_the_model(user, model_needed))
            code = _tokenizer_code(user, found_model)
        except ModelError as error:
            faults.append(model_fault(user, error))
        faults += [*_missing_files(user), *_faulty_template(user)]
        if on_this_host:
            faults += _unfit_nodes(user)
        model = None if found_model is None else found_model.facts
        experts, unfit = _expert_location(user, model)
        faults += unfit
        try:  # even without a device or a model, so that their faults are reported with all others
            resolved = resolve_arguments(user, target, model, carry=carry)
        except Refusal as refusal:
            raise Refusal(list(dict.fromkeys([*faults, *_as_read(refusal.rejections, experts)]))) from refusal
        resolved = replace(resolved, refusals=tuple(_as_read(resolved.refusals, experts)))
        if faults or target is None:
            raise Refusal(list(dict.fromkeys([*faults, *resolved.refusals])))
        remote = found_model is not None and found_model.remote
        examine = found_model.examine if found_model is not None and (remote or examine_local) else None
        files = found_model.files if remote and found_model is not None else None
        check = check_launch(target, model, resolved, examine, files)
    method_notes = _method_notes(target, model, resolved, check)
    notes = (*user.notes, *target.notes, *_model_notes(model, resolved, code), *method_notes, *check.notes)
    return ResolvedPlan(target, model, resolved, notes, check, remote, experts)


def resolve_arguments(
    user: UserInput, target: Target | None, model: ModelFacts | None, *, carry: bool = False
) -> Resolved:
    """Resolve for a target, or for no platform at all."""
    if target is None:
        return resolve(user, model=model, carry=carry)
    return resolve(
        user,
        manifest=target.manifest,
        device=target.device,
        model=model,
        backends=target.extra,
        chosen_because=target.reason,
        carry=carry,
    )


def _model_notes(model: ModelFacts | None, resolved: Resolved, code: Sequence[str]) -> tuple[str, ...]:
    """What an operator should know about what is served of a model. `code`: the classes that read its tokenizer."""
    notes: list[str] = []
    if model is not None and model.text_part_of is not None:
        notes.append(
            f"only the text part of {model.text_part_of} is served, as {model.architecture}: its weights for images "
            "and audio are not loaded, and requests with either are refused"
        )
    if model is not None and model.overrides:
        values = ", ".join(f"{name} = {json.dumps(value)}" for name, value in model.overrides.items())
        notes.append(f"the configuration of {model.name} has other values (json_model_override_args): {values}")
    weights = resolved.config.weights
    if model is not None:
        notes += _rope_notes(model, resolved.config.model.context_length or model.context_length)
    if model is not None and weights.custom_weight_loader:
        loaders = described(weights.custom_weight_loader)
        notes.append(f"the weights of {model.name} are given by {loaders}, whose code runs in each worker")
    if model is not None and runs_code(model, resolved.config.model.model_impl):
        notes.append(f"Python code in the folder of {model.name} is run (trust_remote_code): {code_files(model)}")
    if model is not None and code:
        files = files_of(code)
        notes.append(f"Python code in the folder of {model.name} is run for its tokenizer (trust_remote_code): {files}")
    return tuple(notes)


def _method_notes(target: Target, model: ModelFacts | None, resolved: Resolved, check: LaunchCheck) -> tuple[str, ...]:
    """How the layers compute with quantized weights, if they hold them so and the platform can."""
    method = None if model is None else quantization_method(resolved.config, model)
    refused = any(refusal.what == "model_path" for refusal in check.refusals)
    if model is None or method is None or not method.note or refused:
        return ()
    if missing_capability(method.ops, resolved.capabilities) is not None:
        return ()
    note = method.note
    for op in NAMED_BY.keys() & method.ops:
        products = {*argument_names(target.manifest.facts.ops, op)} - {TORCH_NATIVE}
        if len(products) == 1:
            continue  # there is nothing to choose
        note += f", unless {NAMED_BY[op]} names products that quantize them, which is less exact"
        if mixture(model, {"model_impl": resolved.config.model.model_impl}) is not None:
            note += "; those of experts are never quantized"
    return (f"{model.name}: {note}",)


def _rope_notes(model: ModelFacts, served: int) -> list[str]:
    """Which factors of LongRoPE a context of `served` tokens uses, and how to get the others."""
    original = long_rope_length(model.config, model.context_length)
    if original is None:
        return []
    if served > original:
        return [
            f"{model.name} uses the long factors of LongRoPE for all tokens, because its context of {served} tokens "
            f"exceeds the {original} of pre-training and cached keys cannot change their factors; "
            f"--context-length {original} or less uses the short ones, which suit short requests better"
        ]
    return [
        f"{model.name} uses the short factors of LongRoPE, because its context of {served} tokens does not exceed the "
        f"{original} of pre-training; a larger --context-length, up to {model.context_length}, uses the long ones"
    ]


@dataclass
class FoundModel:
    """A model's facts. `files`: where its headers lie, if it is remote: on a hub, and not downloaded."""

    facts: ModelFacts
    files: Path
    remote: bool = False
    _inspection: Inspection | None = None

    def examine(self, facts: ModelFacts, method: str = "", dequantized: str = "") -> Inspection:
        """As `inspect_model`; asked once."""
        if self._inspection is None and self.remote and runs_code(facts):
            self._inspection = Inspection(unknown="its Python code is not on this machine yet")
        if self._inspection is None:
            self._inspection = inspect_model(replace(facts, path=str(self.files)), method, dequantized)
        return self._inspection


def _tokenizer_code(user: UserInput, found_model: FoundModel | None) -> tuple[str, ...]:
    """The classes in Python code that read the tokenizer of a model on this machine. Raises ModelError remote_code."""
    elsewhere = user.value("tokenizer_path") is not None or user.value("skip_tokenizer_init")
    if found_model is None or found_model.remote or not found_model.facts.remote_code or elsewhere:
        return ()
    return tokenizer_classes(found_model.files)


@contextmanager
def find_the_model(user: UserInput, needed: bool = True) -> Iterator[FoundModel | None]:
    """The model until the context ends. Raises ModelError when it begins."""
    model_path, revision = user.value("model_path"), user.value("revision")
    on = on_hub(model_path, revision, _cache(user))
    options, listing = read_options(user), None if on is None else hub.list_files(on)
    if on is None or listing is None or hub.is_cached(on, listing, options.remote_code):
        yield _find_local(user, needed, options)
        return
    with hub.read_headers(on, listing) as files:
        facts = read_facts(files if on.file is not None else located(files), options._replace(headers_only=True))
        # Messages name the model as the user did: its headers exist only for now.
        yield FoundModel(replace(facts, path=on.name), Path(facts.path), remote=True)


def _find_local(user: UserInput, needed: bool, options: ReadOptions) -> FoundModel | None:
    try:
        path = locate(user.value("model_path"), user.value("revision"), options.remote_code, _cache(user))
        return FoundModel(read_facts(path, options), path)
    except ModelError as error:
        if error.code == "no_model" and not needed:
            return None  # no demo model: values that depend on the model remain unknown
        raise


def _cache(user: UserInput) -> Path | None:
    """The folder for models from a hub; None for the hub library's own."""
    folder = user.value("download_dir")
    return None if folder is None else Path(folder).expanduser().absolute()


def read_options(user: UserInput) -> ReadOptions:
    """What the user says of the model's files. Overrides that are not valid JSON are refused elsewhere."""
    try:
        overrides = json.loads(user.value("json_model_override_args") or "{}")
    except (ValueError, RecursionError):
        overrides = {}
    return ReadOptions(overrides if isinstance(overrides, dict) else {}, bool(user.value("trust_remote_code")))


def _missing_files(user: UserInput) -> list[Rejection]:
    """Rejections of files that do not exist or cannot be seen; their contents are checked when they are read."""
    arguments = ("tokenizer_path", "chat_template", "quantization_param_path")
    paths = {argument: user.value(argument) for argument in arguments}
    return [
        argument_fault(
            user, argument, "not_found", "there is no such file or folder", "Correct the path, or leave it out."
        )
        for argument, path in paths.items()
        if path is not None and not os.path.exists(Path(path).expanduser())
    ]


def _faulty_template(user: UserInput) -> list[Rejection]:
    template = user.value("score_template")
    try:
        if template:
            read_score_template(template)
    except ModelError as error:
        return [argument_fault(user, "score_template", error.code, error.reason, error.remedy)]
    return []


def _expert_location(user: UserInput, model: ModelFacts | None) -> tuple[ExpertLocation | None, list[Rejection]]:
    """What is read of --init-expert-location, and the rejection of what does not fit the model."""
    argument = "init_expert_location"
    value = user.value(argument) or TRIVIAL
    if model is None:
        return None, []  # nothing to compare it with
    mixtures = mixtures_of(model, {"model_impl": user.value("model_impl")})
    if mixtures is None and value != TRIVIAL:
        reason = f"{model.name} has no experts that native layers compute"
        return None, [argument_fault(user, argument, "inert", reason, "Leave it out, or serve a model with experts.")]
    if mixtures is None:
        return None, []
    try:
        redundant = min(max(user.value("ep_num_redundant_experts") or 0, 0), _REDUNDANT)
        return read_location(value, mixtures, redundant), []
    except ModelError as error:
        return None, [argument_fault(user, argument, error.code, error.reason, error.remedy)]


def _as_read(rejections: Sequence[Rejection], experts: ExpertLocation | None) -> list[Rejection]:
    """The rejections, of which that of a planned placement of experts says what was read."""
    return [
        replace(rejection, reason=f"{rejection.reason} (read: {experts})")
        if experts is not None and (rejection.what, rejection.code) == ("init_expert_location", "planned")
        else rejection
        for rejection in rejections
    ]


def _unfit_nodes(user: UserInput) -> list[Rejection]:
    reasons = [numa.why_unfit(node) for node in dict.fromkeys(user.value("numa_node") or ())]
    return [
        argument_fault(user, "numa_node", "no_such_node", reason, "Name nodes of this host, or leave it out.")
        for reason in reasons
        if reason is not None
    ]


def model_fault(user: UserInput, error: ModelError) -> Rejection:
    return error.rejection(user.value("model_path"), _source(user, "model_path"))


def argument_fault(user: UserInput, argument: str, code: str, reason: str, remedy: str) -> Rejection:
    value = user.value(argument)
    shown = None if value is None else ARGUMENTS[argument].show(value)
    return Rejection(code, argument, shown, _source(user, argument), reason, as_sentence(remedy))


def _source(user: UserInput, argument: str) -> str:
    statements = [statement for statement in user.statements if statement.argument == argument]
    return max(statements, key=lambda statement: statement.origin).source if statements else "automatic choice"

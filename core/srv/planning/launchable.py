"""What a launch refuses once its arguments are resolved, and before it reads weights. Torch-free.

    arguments ──► resolve ──► check_launch ──► weights, engine
                     └── `srv plan`, `srv launch` and `srv.LLM` ask the same ──┘

What no process without the device or the files can know is in `LaunchCheck.unchecked`, never silently accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from srv.args.config import ARGUMENTS
from srv.args.statement import Layer, Resolved
from srv.errors import ModelError, Refusal, Rejection, as_sentence
from srv.models.choice import LayerChoice, choose_layers
from srv.models.config.tensor_notes import is_uncompared, tensor_notes
from srv.models.inspection import Inspection, inspect_model
from srv.planning.kernel import ATTENTION_SLOTS
from srv.planning.kernels import KernelPlan, plan_kernels, plan_quantized
from srv.planning.kv_scales import configured_scales, has_scales, missing_scales, unused_scheme
from srv.planning.layer_options import layer_options
from srv.planning.offload import host_layers, moves_weights
from srv.planning.reply_formats import unusable_reply_formats
from srv.planning.states import missing_native_layers
from srv.planning.target import Target
from srv.platform.layers import LayerKind, layer_kinds, missing_traits, unsupported_layers
from srv.platform.placeholder import NO_DEVICE_CODE, DescribedBackend
from srv.specs import ModelFacts

_FILES = "the tokenizer, the chat template, and whether the weights have the names and shapes that the layers expect"
# Codes of a model, each with that of the argument for which resolution says the same.
_TOLD = {
    ("no_weights", "format_not_there"),
    ("wrong_format", "format_not_there"),
    ("unsupported_sharding", "not_divisible"),
}
_HEAD = "whether its stored output layer is a copy of the embedding: if not, it is loaded as well and takes its size"


class LaunchCheck(NamedTuple):
    """`refusals`: why a launch would end before it reads weights. `unchecked`: what only the launch itself finds.

    `has_pools`: the KV pools of the model can be described. `kernels`: what would compute each part, as far as the
    refusals allow to know it. `notes`: warnings.
    """

    refusals: tuple[Rejection, ...]
    unchecked: tuple[str, ...]
    has_pools: bool = True
    kernels: KernelPlan = KernelPlan(())
    notes: tuple[str, ...] = ()


def check_launch(
    target: Target,
    model: ModelFacts | None,
    resolved: Resolved,
    inspect: Callable[[ModelFacts, str, str], Inspection] | None = inspect_model,
    files: Path | None = None,
) -> LaunchCheck:
    """What prevents a resolved launch from reaching the weights, and the kernels by which it would compute.

    `inspect`: as `inspect_model`, of models without native layers; None leaves that to the engine, which asks at once.
    `files`: where the headers of the files of a model lie that is not on this machine; its weights are not there.
    """
    here = None if model is None or files is not None else Path(model.path)
    refusals = (*_without_device_code(target, resolved), *unusable_reply_formats(resolved, here))
    if model is None:
        kernels = plan_kernels(target, None, resolved, None)
        return LaunchCheck(refusals, ("everything that depends on the model",), kernels=kernels)
    refused = missing_native_layers(resolved.config, model)
    if refused is not None:
        kernels = plan_kernels(target, None, resolved, None)
        return LaunchCheck((*refusals, refused), (), has_pools=False, kernels=kernels)
    try:
        stored = model if files is None else replace(model, path=str(files))  # methods read their own files
        choice = choose_layers(stored, layer_options(resolved.config))
        if (refused := _not_moved(stored, resolved)) is not None:
            kernels = plan_kernels(target, None, resolved, None)
            return LaunchCheck((*refusals, refused), (), has_pools=False, kernels=kernels)
        kernels = plan_kernels(target, stored, resolved, choice)
    except ModelError as raised:
        error = raised if files is None else raised.renamed(str(files), model.path)
        kernels = plan_kernels(target, None, resolved, None)
        is_refused = any((error.code, refusal.code) in _TOLD for refusal in resolved.refusals)
        refusals = refusals if is_refused else (*refusals, _of_model(resolved, error))
        return LaunchCheck(refusals, (), has_pools=not moves_weights(resolved.config), kernels=kernels)
    refusals += kernels.rejections
    unchecked = [_FILES]
    notes = tensor_notes(model, Path(stored.path))
    if files is not None and is_uncompared(model, files):
        unchecked.append(_HEAD)
    path = resolved.config.weights.quantization_param_path
    # A file that does not exist is refused together with those of other arguments.
    has_values = files is None if path is None else path.expanduser().exists()
    calculated = resolved.config.weights.calculate_kv_scales
    if path is None and not has_values and not calculated and has_scales(resolved.config, model):
        unchecked.append("the scales of keys and values, which follow the headers in its files")
    try:
        if has_values:
            notes += missing_scales(resolved.config, model, configured_scales(resolved.config, model))
    except ModelError as error:
        refusals += (_of_scales(resolved, error),)
    if resolved.provenance["kv_cache_dtype"].layer is not Layer.USER:
        notes += unused_scheme(resolved.config, model, supported="fp8_kv" in resolved.capabilities)
    check = LaunchCheck(refusals, tuple(unchecked), kernels=kernels, notes=notes)
    if choice.tree is None and inspect is not None:
        answer = inspect(
            model, *("" if method is None else method.name for method in (choice.method, choice.dequantized))
        )
        check = _with_class(check, target, model, resolved, choice, answer)
    return check._replace(notes=(*check.notes, *check.kernels.rounded()))


def check_model(model: ModelFacts, resolved: Resolved) -> tuple[Rejection, ...]:
    """Why a model with these arguments cannot be served on any platform."""
    try:
        choose_layers(model, layer_options(resolved.config))
    except ModelError as error:
        return (_of_model(resolved, error),)
    return ()


def _not_moved(model: ModelFacts, resolved: Resolved) -> Rejection | None:
    """Why layers cannot be kept in host memory as the arguments ask; None if they can."""
    try:
        host_layers(resolved.config, model)
    except Refusal as refusal:
        (refused,) = refusal.rejections
        return replace(refused, who=resolved.provenance[refused.what].owner)
    return None


def _of_scales(resolved: Resolved, error: ModelError) -> Rejection:
    """The rejection of the file with the scales of a KV pool, or of the model that has them."""
    path = resolved.provenance["quantization_param_path"]
    if path.value is None:
        return _of_model(resolved, error)
    remedy = as_sentence(error.remedy)
    return Rejection(error.code, "quantization_param_path", str(path.value), path.owner, error.reason, remedy)


def _of_model(resolved: Resolved, error: ModelError) -> Rejection:
    """The rejection of the model, with the source of its path."""
    provenance = resolved.provenance["model_path"]
    path = None if provenance.value is None else str(provenance.value)
    return error.rejection(path, provenance.owner if provenance.layer is Layer.USER else "automatic choice")


def _without_device_code(target: Target, resolved: Resolved) -> tuple[Rejection, ...]:
    """The rejection of a platform that is only described."""
    specs = [choice.spec for choice in resolved.backends.values()]
    described = next((spec for spec in specs if isinstance(spec, DescribedBackend)), None)
    if described is None:
        return ()
    owner = resolved.provenance["device"].owner
    return (Rejection(NO_DEVICE_CODE, "device", target.manifest.name, owner, described.reason, f"{described.remedy}."),)


def _with_class(
    check: LaunchCheck, target: Target, model: ModelFacts, resolved: Resolved, choice: LayerChoice, answer: Inspection
) -> LaunchCheck:
    """The check, with what transformers says of its class."""
    refusals, notes, kernels = check.refusals, check.notes, check.kernels
    refusals += _of_transformers(target, model, resolved, answer)
    if choice.method is not None and answer.quantized:
        notes += (f"{model.name}: {answer.quantized}, in the class of transformers",)
        quantized = plan_quantized(target, resolved, choice.method, answer.ops)
        refusals += quantized.rejections
        kernels = KernelPlan((*kernels.kernels, *quantized.kernels), (*kernels.rejections, *quantized.rejections))
    unchecked = check.unchecked
    if answer.unknown:
        unchecked += (f"whether the class of {model.architecture} in transformers fits: {answer.unknown}",)
    return LaunchCheck(refusals, unchecked, kernels=kernels, notes=notes)


def _of_transformers(
    target: Target, model: ModelFacts, resolved: Resolved, answer: Inspection
) -> tuple[Rejection, ...]:
    if (refused := answer.refused) is not None:
        return (_of_model(resolved, ModelError(refused.code, refused.what, refused.reason, refused.remedy)),)
    slots = dict.fromkeys(resolved.backends[slot].spec.name for slot in ATTENTION_SLOTS if slot in resolved.backends)
    kinds = layer_kinds(answer.layers, model)
    refusals = (_unfit(target, model, resolved, kinds, name, len(slots) > 1) for name in slots)
    return tuple(refusal for refusal in refusals if refusal is not None)


def _unfit(
    target: Target, model: ModelFacts, resolved: Resolved, layers: Sequence[LayerKind], name: str, split: bool
) -> Rejection | None:
    """The rejection of a chosen attention backend that lacks a trait of a layer; `split`: there are two of them."""
    traits = {spec.name: spec.layer_traits for spec in target.backends("attention")}
    missing = {
        other: unsupported_layers(layers, partial(missing_traits, layer_traits))
        for other, layer_traits in traits.items()
    }
    if not missing[name]:
        return None
    slot = next(slot for slot in ATTENTION_SLOTS if resolved.backends[slot].spec.name == name)
    argument = slot if split else "attention_backend"
    others = ", ".join(other for other, reasons in missing.items() if not reasons)
    another = f"Choose another backend with {ARGUMENTS[argument].flag} ({others}), or" if others else "Choose"
    reason = f"attention backend {name} does not fit {model.name}: {'; '.join(missing[name])}"
    owner = resolved.provenance[slot].owner
    return Rejection("layers_unsupported", argument, name, owner, reason, f"{another} another platform with --device.")

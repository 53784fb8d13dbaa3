"""How a model would be built: native layers or transformers, the method of its weights, and their format. Torch-free.

`srv.models.build` builds what is chosen here, and `srv plan` asks the same before there is a device. Must not know
platforms nor layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from srv.errors import ModelError
from srv.models import derive
from srv.models.blueprint import MoE, Part
from srv.models.checkpoints.safetensors_header import PACKED_BITS
from srv.models.facts.sharding import divisions
from srv.models.facts.weight_rules import check_dequantized, check_rules, has_quantized_experts
from srv.models.families.registry import is_native, native_names
from srv.models.families.trees import native_tree
from srv.models.remote_code import check_layer_code, may_run
from srv.models.unsupported import CORRECT, InvalidConfig, UnsupportedConfig
from srv.quantization import registry as quantization_methods
from srv.quantization.method import QuantMethod
from srv.specs import ModelFacts

# The ends of the names of classes whose head the wrapped class of transformers, which generates text, would leave out.
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
REWARD = "RewardModel"
FROM_LOADERS = "loaders"  # the format of weights that loaders of other distributions give


class LayerOptions(NamedTuple):
    """What the user asks of the layers and the weights of a model.

    `model_impl`: "srv" uses the native layers, "transformers" the class of transformers, "auto" the native layers if
    they implement everything in the configuration. `load_format`: "auto" is the checkpoint's own, "safetensors" or
    "gguf"; "dummy" means random weights. `dequantize`: dequantize the weights at load if the method allows it.
    `quantization`: the method of the checkpoint; None takes it from the facts. `online_quantization`: the method by
    which an unquantized checkpoint is quantized at load. `ranks`: over how many the model is sharded. `loaders`: the
    weight loaders of other distributions that give the weights in place of files; () for none.
    """

    model_impl: str = "auto"
    load_format: str = "auto"
    dequantize: bool = False
    quantization: str | None = None
    online_quantization: str | None = None
    ranks: int = 1
    loaders: tuple[str, ...] = ()


class LayerChoice(NamedTuple):
    """What a model is built of.

    `tree`: of the native layers; None for the class of transformers, and `fallback` then says why. `method`: how the
    layers hold their weights; None for unquantized ones. `load_format`: "safetensors", "gguf", "dummy" or FROM_LOADERS.
    `dequantized`: the method of quantized safetensors files whose weights become floats while they are loaded.
    """

    tree: Part | None
    method: QuantMethod | None
    load_format: str
    fallback: str = ""
    dequantized: QuantMethod | None = None


def choose_layers(facts: ModelFacts, options: LayerOptions = LayerOptions()) -> LayerChoice:  # noqa: B008 - immutable
    """Choose what to build a model of.

    Raises ModelError: no_weights, wrong_format, unsupported_architecture, remote_code, unsupported_quantization,
    unsupported_config or unsupported_sharding.
    """
    model_impl, load_format, dequantize, quantization, online_quantization, ranks, loaders = options
    resolved_format = _load_format(facts, load_format, loaders)
    if resolved_format == "safetensors":
        _check_types(facts)
    in_floats = quantization_methods.dequantizes(facts, dequantize, resolved_format)
    method = _method(facts, quantization, online_quantization, dequantize=in_floats)
    tree, fallback = _native_tree(facts, model_impl)
    if resolved_format == FROM_LOADERS:
        _check_loaders(facts, method, tree, fallback)
    if tree is None:
        _check_generates(facts, fallback)
        if may_run(facts):
            check_layer_code(facts)
    if ranks > 1 and (tree is None or (method is not None and method.sharding is not None)):
        obstacle = (method and method.sharding) or f"only native layers can, and it has none ({fallback})"
        reason = f"it cannot be sharded over {ranks} ranks: {obstacle}"
        raise ModelError("unsupported_sharding", facts.path, reason, "Leave --tp-size at 1")
    divided = divisions(facts, in_blocks=not dequantize) if ranks > 1 else None
    if isinstance(divided, str):
        reason = f"it cannot be sharded over {ranks} ranks: {divided}"
        raise ModelError("unsupported_sharding", facts.path, reason, "Leave --tp-size at 1")
    stored = quantization_methods.method_of(facts)
    dequantized = stored if method is None and stored is not None and resolved_format == "safetensors" else None
    if tree is None and method is not None and resolved_format == "gguf":
        method = None  # the loader dequantizes its blocks
    if tree is None and method is not None and (method.online or method.schemes is None):
        raise _of_native_layers_alone(facts, method, fallback, model_impl, online_quantization)
    if tree is not None and method is not None:
        check_rules(facts, tree, method)
    if tree is not None and dequantized is not None:
        check_dequantized(facts, tree, dequantized)
    moe = None if tree is None else derive.find(tree, MoE)
    refused = method.experts(moe.experts.bias) if moe is not None and method is not None and method.experts else None
    if refused is not None and method is not None and (method.online or has_quantized_experts(facts)):
        reason, remedy = f"its experts cannot be quantized with {method.name}: {refused[0]}", refused[1]
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    return LayerChoice(tree, method, resolved_format, fallback, dequantized)


def _of_native_layers_alone(
    facts: ModelFacts, method: QuantMethod, fallback: str, model_impl: str, online: str | None
) -> ModelError:
    """The refusal of a method by which classes of transformers cannot hold weights."""
    reason, remedy = f"its weights are quantized with {method.name}", "Use the checkpoint in full precision"
    if method.online:
        reason = f"its weights would be quantized with {method.name} at load"
        remedy = f"Leave out {'--torchao-config' if online else '--quantization'}"
    elif method.dequantizable:
        remedy = "Set --dequantize-weights: the weights then take the model's dtype"
    if model_impl == "transformers" and is_native(facts.architecture):
        remedy = "Leave --model-impl at auto"
    reason += f", which only native layers support: {fallback}"
    return ModelError("unsupported_quantization", facts.path, reason, remedy)


def _check_generates(facts: ModelFacts, fallback: str) -> None:
    """Refuse a model that would run through transformers, and does not generate text. `fallback`: why it would."""
    name, native = facts.architecture, native_names()
    if facts.generates and not name.endswith((*HEADS, REWARD)):
        return
    reason = f"it generates no text, and only native layers compute what it does: {fallback}"
    heads = ", ".join(each for each in native if each.endswith(HEADS))
    remedy = f"Serve a model of one of the classes that have native heads: {heads}"
    if name in native:
        remedy = "Leave --model-impl at auto" if not facts.generates else "Use another checkpoint of the model"
    raise ModelError("unsupported_architecture", f"{name} ({facts.path})", reason, remedy)


def _method(facts: ModelFacts, quantization: str | None, online: str | None, *, dequantize: bool) -> QuantMethod | None:
    """The method by which the layers hold their weights; None for unquantized layers.

    Raises ModelError if `srv` has no such method, or if weights that are quantized already would be quantized again.
    """
    method = quantization_methods.method_of(facts)
    stored = facts.quantization or quantization or (None if method is None else method.name)
    if online and (stored is not None or facts.stored_types.get("int8")):
        reason = f"its weights are quantized already ({stored or 'int8'}), but {online} needs unquantized ones"
        remedy = "Leave out --torchao-config, or use the checkpoint in full precision"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    floats = sorted(dtype for dtype in facts.stored_types if dtype.startswith("float8"))
    if stored is None and floats:
        reason = f"some of its weights are stored as {floats[0]}, but config.json names no quantization method"
        remedy = "Name it with --quantization, or use the checkpoint in full precision"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    named = quantization_methods.find(quantization_methods.meant(quantization, facts) or stored)
    unfit = named.accepts(facts) if named is not None and named.at_load is not None and named.accepts else None
    if facts.quantization is None and named is not None and unfit is not None:
        reason = f"{unfit}, which {named.name} does not quantize"
        raise ModelError("unsupported_quantization", facts.path, reason, "Leave out --quantization")
    readable = stored is None or _is_readable(facts, named)
    detail = None if readable else _unsupported_form(facts)
    if not readable and (named is None or detail is not None or facts.quantization is not None):
        reason = f"its weights are quantized with {stored}, which srv does not load yet"
        if stored == quantization_methods.UNKNOWN:
            reason = "its quantization_config states no quant_method"
        reason += f" in this form: {detail}" if detail else ""
        others = ", ".join(name for name in quantization_methods.detectable_names() if name != stored)
        remedy = f"Use the checkpoint in full precision, in a GGUF file, or quantized with one of {others}"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    return quantization_methods.chosen(facts, quantization, online, dequantize=dequantize)


def _check_types(facts: ModelFacts) -> None:
    """Refuse weights of a type of which several share bytes: no method stores them so in safetensors files."""
    found = sorted(PACKED_BITS.keys() & facts.stored_types.keys())
    if found:
        reason = f"some of its weights are stored as {found[0]} (floats of {PACKED_BITS[found[0]]} bits)"
        reason += ", which srv does not load"
        remedy = "Use the checkpoint in full precision, or one whose weights of 4 bits are in MXFP4 or packed integers"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)


def _is_readable(facts: ModelFacts, method: QuantMethod | None) -> bool:
    """Whether a method need not be asked for the form in which a checkpoint is stored, or recognises it."""
    if method is None or facts.format == "gguf":
        return method is not None
    answer = method.detect(Path(facts.path), facts.config)
    return answer is True or (method.accepts is not None and not isinstance(answer, str))


def _unsupported_form(facts: ModelFacts) -> str | None:
    return quantization_methods.unsupported_form(Path(facts.path), facts.config)


def _check_loaders(facts: ModelFacts, method: QuantMethod | None, tree: Part | None, fallback: str) -> None:
    """Refuse a model whose weights no loader of another distribution can give."""
    reason = None
    if facts.format == "gguf":
        reason = "its file holds quantized blocks"
    elif method is not None and not method.online:
        reason = f"its weights are quantized with {method.name}"
    elif tree is None:
        reason = f"layers of transformers read their weights in another way: {fallback}"
    if reason is not None:
        reason += ", and weight loaders give unquantized tensors of native layers (custom_weight_loader)"
        raise ModelError("loader_unfit", facts.path, reason, "Leave out --custom-weight-loader")


def _load_format(facts: ModelFacts, requested: str, loaders: Sequence[str]) -> str:
    if requested == "dummy":
        return requested
    if loaders:
        return FROM_LOADERS
    if facts.format == "config":
        remedy = "Download the weights, or use --load-format dummy for random ones"
        raise ModelError("no_weights", facts.path, "the folder has a configuration but no weights", remedy)
    if requested not in ("auto", facts.format):
        remedy = f"Leave out --load-format, or set it to {facts.format}"
        raise ModelError("wrong_format", facts.path, f"it is {facts.format}, not {requested} as requested", remedy)
    return facts.format


def _native_tree(facts: ModelFacts, requested: str) -> tuple[Part | None, str]:
    """The blueprint of native layers; or None, and why transformers is used instead."""
    if requested == "transformers":
        return None, "model_impl is transformers"
    try:
        return native_tree(facts.architecture, facts.config), ""
    except UnsupportedConfig as error:
        if requested == "srv":
            raise ModelError("unsupported_config", facts.path, str(error), "Leave --model-impl at auto") from error
        return None, str(error)
    except InvalidConfig as error:
        raise ModelError("unsupported_config", facts.path, str(error), CORRECT) from error

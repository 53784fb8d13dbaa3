"""Rules for quantized weights: methods of checkpoints, online quantization, and the capabilities that both need."""

from __future__ import annotations

from functools import partial

from srv.models.checkpoints.gguf_types import CODEBOOK_TYPES, OP_TYPES
from srv.platform.capabilities import missing_capability
from srv.platform.facts import Constraint, Default, ResolutionContext
from srv.quantization.method import QuantMethod
from srv.quantization.registry import find, meant, method_of, of_form
from srv.specs import ModelFacts

OTHER_METHOD = "other_method"


def _method(model: ModelFacts) -> str | None:
    """The value of `quantization` for a checkpoint; None if it is not quantized, or by an unsupported method."""
    method = method_of(model)
    return None if method is None else method.name


def _method_fits(context: ResolutionContext) -> str | None:
    model, method = context.model, context["quantization"]
    if model is None or method is None or meant(method, model) == _method(model) or _method_from_user(context):
        return None
    actual = "are not quantized" if model.quantization is None else f"are quantized with {model.quantization}"
    return f"the weights of {model.path} {actual}"


def _method_from_user(context: ResolutionContext) -> QuantMethod | None:
    """The method that the user sets for a checkpoint whose configuration names none, if it allows that."""
    model = context.model
    if model is None or model.quantization is not None or method_of(model) is not None:
        return None
    method = find(context["quantization"])
    return None if method is None or method.accepts is None else method


def _weights_fit(context: ResolutionContext) -> str | None:
    method = _method_from_user(context)
    if context.model is None or method is None or method.accepts is None:
        return None
    return method.accepts(context.model)


def _quantizes_online(context: ResolutionContext) -> str | None:
    method = find(context["torchao_config"])
    if method is None or method.online:
        return None
    return f"{method.name} is a method of quantized checkpoints, and does not quantize weights while they are loaded"


def _dequantized_only(context: ResolutionContext) -> str | None:
    """Why quantized weights would be dequantized, though the user did not ask for it."""
    model = context.model
    if model is None or model.format != "gguf" or context["dequantize_weights"]:
        return None
    if context["load_format"] == "dummy" or context["model_impl"] == "transformers":
        return None
    slow = sorted(name for name in model.stored_types if name in CODEBOOK_TYPES)
    if not slow or "gguf_codebooks" in context.capabilities:
        return None
    return f"the platform has no kernel for weights of type {', '.join(slow)}, so that they would be dequantized"


def _not_quantized_yet(context: ResolutionContext) -> str | None:
    model, online_method = context.model, context["torchao_config"]
    if model is None or online_method is None:
        return None
    method = _method(model) or model.quantization or ("8-bit integers" if model.stored_types.get("int8") else None)
    if method is None:
        return None
    return (
        f"the weights of {model.path} are already quantized ({method}), and {online_method} needs unquantized weights"
    )


def _method_at_load(context: ResolutionContext) -> QuantMethod | None:
    """The method that the user sets with --quantization if that quantizes the weights while they are loaded."""
    model, method = context.model, find(context["quantization"])
    if model is None or method is None or method.at_load is None:
        return None
    if _method(model) is not None or model.quantization is not None or method.at_load(model) is None:
        return None
    return method


def _quantized_at_load(context: ResolutionContext) -> str | None:
    """Why another method cannot quantize the weights while they are loaded: --quantization does already."""
    method = None if context["torchao_config"] is None else _method_at_load(context)
    return None if method is None else f"--quantization {method.name} quantizes the weights while they are loaded"


def _native_layers(context: ResolutionContext) -> str | None:
    if context["torchao_config"] is None or context["model_impl"] != "transformers":
        return None
    return "the layers of transformers do not quantize weights while they are loaded"


def _native_layers_at_load(context: ResolutionContext) -> str | None:
    method = None if context["model_impl"] != "transformers" else _method_at_load(context)
    if method is None:
        return None
    return (
        f"{method.name} quantizes the weights of this checkpoint while they are loaded, which the layers of "
        "transformers do not"
    )


def _ops_supported(argument: str, context: ResolutionContext) -> str | None:
    """Why the platform cannot multiply by the weights of a method: it lacks ops, and they are not dequantized."""
    model = context.model
    method = find(context[argument]) if model is None else of_form(find(meant(context[argument], model)), model)
    capability = None if method is None else missing_capability(method.ops, context.capabilities)
    if method is None or capability is None or (method.dequantizable and context["dequantize_weights"]):
        return None
    return f"the platform does not support weights quantized with {method.name} (capability {capability})"


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default(
        "quantization",
        lambda context: _method(context.model) if context.model else None,
        "the weights of the checkpoint are quantized with that method",
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "quantization", OTHER_METHOD, _method_fits, "Leave it out; the method is then taken from the checkpoint."
    ),
    Constraint(
        "quantization",
        "no_integers",
        _weights_fit,
        "Leave it out, or use the unquantized checkpoint of the model.",
    ),
    Constraint(
        "quantization",
        "native_layers_only",
        _native_layers_at_load,
        "Leave it out, or leave --model-impl at auto.",
        reads=("model_impl",),
    ),
    Constraint("torchao_config", OTHER_METHOD, _quantizes_online, "Leave it out."),
    Constraint(
        "torchao_config",
        "quantized_already",
        _not_quantized_yet,
        "Leave it out, or use the unquantized checkpoint of the model.",
    ),
    Constraint("torchao_config", "excluded", _quantized_at_load, "Leave one of the two out.", reads=("quantization",)),
    Constraint(
        "torchao_config",
        "native_layers_only",
        _native_layers,
        "Leave it out, or leave --model-impl at auto.",
        reads=("model_impl",),
    ),
)

# Constraints that apply only if a platform is known.
DEVICE_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "quantization",
        "capability_missing",
        partial(_ops_supported, "quantization"),
        "Set --dequantize-weights (the weights then take the model's dtype), or use an unquantized checkpoint of the "
        "model or another platform.",
        reads=("dequantize_weights",),
    ),
    Constraint(
        "torchao_config",
        "capability_missing",
        partial(_ops_supported, "torchao_config"),
        "Leave it out, or use another platform.",
    ),
    Constraint(
        "dequantize_weights",
        "slower_path",
        _dequantized_only,
        f"Use a file of {', '.join(name for name in OP_TYPES if name not in CODEBOOK_TYPES)}, or set "
        "--dequantize-weights: the weights then take the model's dtype.",
        reads=("load_format", "model_impl"),
    ),
)

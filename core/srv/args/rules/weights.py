"""Rules for quantized weights: methods of checkpoints, online quantization, and the capabilities that both need."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srv.platform.facts import Constraint, Default, ResolutionContext
from srv.quantization import modelslim
from srv.quantization import w8a8_int8 as int8
from srv.specs import ModelFacts

_INT8_METHODS = (modelslim.NAME, int8.NAME)
# Value of `torchao_config` -> required capability.
_ONLINE_CAPABILITIES: Mapping[str, str] = MappingProxyType({"int8dq": "w8a8", "int8wo": "int8_weights"})


def _method(model: ModelFacts) -> str | None:
    """The value of `quantization` for a checkpoint; None if it is not quantized, or by an unsupported method."""
    if model.format == "gguf":
        return "gguf"
    return model.quantization if model.quantization in _INT8_METHODS else None


def _method_fits(context: ResolutionContext) -> str | None:
    model, method = context.model, context["quantization"]
    if model is None or method is None or method == _method(model) or _method_from_user(context):
        return None
    actual = "are not quantized" if model.quantization is None else f"are quantized with {model.quantization}"
    return f"the weights of {model.path} {actual}"


def _method_from_user(context: ResolutionContext) -> bool:
    """Whether the user sets `int8.NAME` for a checkpoint whose configuration does not name a method."""
    model = context.model
    plain = model is not None and model.format != "gguf" and model.quantization is None
    return plain and context["quantization"] == int8.NAME


def _has_int8_weights(context: ResolutionContext) -> str | None:
    if context.model is None or not _method_from_user(context) or context.model.int8_params:
        return None
    return f"none of the weights of {context.model.path} are 8-bit integers"


def _not_quantized_yet(context: ResolutionContext) -> str | None:
    model, online_method = context.model, context["torchao_config"]
    if model is None or online_method is None:
        return None
    method = _method(model) or model.quantization or ("8-bit integers" if model.int8_params else None)
    if method is None:
        return None
    return (
        f"the weights of {model.path} are already quantized ({method}), and {online_method} needs unquantized weights"
    )


def _native_layers(context: ResolutionContext) -> str | None:
    if context["torchao_config"] is None or context["model_impl"] != "transformers":
        return None
    return "the layers of transformers support unquantized weights only"


def _int8_supported(context: ResolutionContext) -> str | None:
    if context["quantization"] not in _INT8_METHODS or "w8a8" in context.capabilities:
        return None
    return "the platform does not support int8 matrix multiplication (capability w8a8)"


def _online_quantization_supported(context: ResolutionContext) -> str | None:
    method = context["torchao_config"]
    capability = _ONLINE_CAPABILITIES.get(method)
    if capability is None or capability in context.capabilities:
        return None
    return f"the platform does not support weights quantized with {method} (capability {capability})"


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default(
        "quantization",
        lambda context: _method(context.model) if context.model else None,
        "the weights of the checkpoint are quantized with that method",
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "quantization", "other_method", _method_fits, "Leave it out; the method is then taken from the checkpoint."
    ),
    Constraint(
        "quantization",
        "no_integers",
        _has_int8_weights,
        "Leave it out; --torchao-config int8dq quantizes weights to 8 bits while they are loaded.",
    ),
    Constraint(
        "torchao_config",
        "quantized_already",
        _not_quantized_yet,
        "Leave it out, or use the unquantized checkpoint of the model.",
    ),
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
        _int8_supported,
        "Use an unquantized checkpoint of the model, or another platform.",
    ),
    Constraint(
        "torchao_config", "capability_missing", _online_quantization_supported, "Leave it out, or use another platform."
    ),
)

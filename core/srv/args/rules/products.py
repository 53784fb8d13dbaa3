"""Rules for the implementations of quantized products, and for the activations that they multiply."""

from __future__ import annotations

from srv.models.facts.special_layers import mixture
from srv.models.facts.weight_rules import has_quantized_experts
from srv.platform.facts import Constraint, ResolutionContext
from srv.platform.op_choice import AUTO, FULL_PRECISION, PRECISION
from srv.quantization.method import QuantMethod
from srv.quantization.registry import chosen, method_of
from srv.specs import ModelFacts

_WEIGHTS_ALONE = frozenset(("linear_int8", "linear_gguf"))  # ops whose activations are in the model's dtype
_MXFP4 = "MXFP4"  # blocks of 32 weights
READS = ("quantization", "torchao_config", "dequantize_weights", "model_impl")  # of `quantizes_inputs`


def _no_fp8_products(context: ResolutionContext) -> str | None:
    if context.model is None or context["fp8_gemm_backend"] == AUTO:
        return None
    method = _method(context.model, context)
    if method is not None and "linear_fp8" in method.ops:
        return None
    return f"{context.model.name} has no weights in FP8"


def _method(model: ModelFacts, context: ResolutionContext) -> QuantMethod | None:
    """How the layers hold weights. Classes of transformers dequantize GGUF files, and quantize nothing at load."""
    quantization, online = context["quantization"], context["torchao_config"]
    method = chosen(model, quantization, online, dequantize=bool(context["dequantize_weights"]))
    if method is None or context["model_impl"] != "transformers":
        return method
    return None if method.online or model.format == "gguf" else method


def quantizes_inputs(context: ResolutionContext) -> bool:
    """Whether the layers have FP8 weights, and the checkpoint states that their inputs are quantized to FP8, too.

    For the defaults of platforms that have such products; it reads `READS`.
    """
    method = None if context.model is None else _method(context.model, context)
    return method is not None and method.fp8_inputs


def _no_mxfp4_experts(context: ResolutionContext) -> str | None:
    if context.model is None or context["mxfp4_moe_precision"] == "default":
        return None
    method = method_of(context.model)
    types = {*context.model.stored_types, *(() if method is None else method.block_types)}
    if _MXFP4 in types and mixture(context.model, {"model_impl": context["model_impl"]}) is not None:
        return None
    return f"{context.model.name} has no experts in MXFP4 that native layers compute"


def _other_activations(context: ResolutionContext) -> str | None:
    if context["mxfp4_moe_precision"] == "default" or context["dtype"] in (AUTO, "bfloat16"):
        return None
    return f"activations are {context['dtype']} (dtype)"


def _rounds_nothing(context: ResolutionContext) -> str | None:
    if context.model is None or context[PRECISION] != FULL_PRECISION:
        return None
    if context["model_impl"] == "transformers" and context.model.format == "gguf":
        return "transformers computes with the dequantized weights of GGUF files only (model_impl is transformers)"
    method = _method(context.model, context)
    if method is not None and not _WEIGHTS_ALONE.isdisjoint(method.ops):
        return None
    return f"{context.model.name} has no weights that are quantized without their activations"


def _int8_experts(context: ResolutionContext) -> str | None:
    """Experts have one op for int8 weights, whatever the activations of the checkpoint."""
    model = context.model
    if (
        model is None
        or context[PRECISION] != FULL_PRECISION
        or mixture(model, {"model_impl": context["model_impl"]}) is None
    ):
        return None
    method = _method(model, context)
    if method is None or "linear_int8" not in method.ops or not (method.online or has_quantized_experts(model)):
        return None
    return "the op for experts with int8 weights quantizes activations to 8 bits on every platform"


USER_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "fp8_gemm_backend",
        "inert",
        _no_fp8_products,
        "Leave it out, or serve a checkpoint in FP8, or set --quantization fp8.",
        reads=READS,
    ),
    Constraint(PRECISION, "inert", _rounds_nothing, "Leave it out.", reads=READS),
    Constraint(PRECISION, "unsupported", _int8_experts, "Leave it out, or set --dequantize-weights.", reads=READS),
    Constraint("mxfp4_moe_precision", "inert", _no_mxfp4_experts, "Leave it out.", reads=("model_impl",)),
    Constraint(
        "mxfp4_moe_precision",
        "excluded",
        _other_activations,
        "Set --dtype bfloat16, or leave it out.",
        reads=("dtype",),
    ),
)

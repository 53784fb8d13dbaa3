"""Defaults and constraints of arguments on NVIDIA GPUs, among them what the kernels of experts support."""

from __future__ import annotations

from srv.args.rules.reserve import published_contributions, published_fraction
from srv.args.rules.speculative import draft_tree_constraint
from srv.platform.facts import Constraint, Default, ResolutionContext
from srv_gpu.fp8_defaults import FP8_PRODUCTS

_GPT_OSS = "GptOssForCausalLM"
_CUTLASS = "flashinfer_cutlass"


def _is_gpt_oss(context: ResolutionContext) -> bool:
    return context.model is not None and context.model.architecture == _GPT_OSS


def _quantization_method(context: ResolutionContext) -> str | None:
    """The quantization method: the user's, or else the checkpoint's."""
    quantization: str | None = context["quantization"]
    return quantization or (context.model.quantization if context.model is not None else None)


def _cutlass_methods(context: ResolutionContext) -> str | None:
    method = _quantization_method(context)
    if context["moe_runner_backend"] != _CUTLASS or method is None:
        return None
    return f"its kernels support experts in 16 bits, not in {method}"


def _cutlass_ep_size(context: ResolutionContext) -> str | None:
    if context["moe_runner_backend"] != _CUTLASS or context["ep_size"] in (1, context["tp_size"]):
        return None
    return f"{_CUTLASS} supports an ep_size of 1 or {context['tp_size']} (tp_size)"


DEFAULTS = (
    Default(
        "enable_allreduce_fusion",
        lambda context: (
            True
            if _is_gpt_oss(context) and context.device.variant == "sm100" and not context["enable_dp_attention"]
            else None
        ),
        "GPT-OSS gains from it on compute capability 10.0",
        reads=("enable_dp_attention",),
    ),
    FP8_PRODUCTS,
    published_fraction(),
)

CONTRIBUTIONS = published_contributions()

CONSTRAINTS = (
    Constraint(
        "moe_runner_backend",
        "method_unfit",
        _cutlass_methods,
        "Choose another backend, or an unquantized checkpoint.",
        reads=("quantization",),
    ),
    Constraint(
        "ep_size",
        "not_divisible",
        _cutlass_ep_size,
        "Set it to 1 or to tp_size, or choose another moe_runner_backend.",
        reads=("moe_runner_backend", "tp_size"),
    ),
    draft_tree_constraint("flashinfer"),
)

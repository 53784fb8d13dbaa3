"""Defaults and constraints of arguments on NVIDIA GPUs: the MoE runner backend, and what its kernels support."""

from __future__ import annotations

from srv.args.rules.reserve import published_contributions, published_fraction
from srv.args.rules.speculative import draft_tree_constraint
from srv.platform.facts import Constraint, Default, ResolutionContext

_GPT_OSS = "GptOssForCausalLM"
_CUTLASS, _TRTLLM = "flashinfer_cutlass", "flashinfer_trtllm"
_TRITON_PACKAGE = "triton-kernels"


def _is_gpt_oss(context: ResolutionContext) -> bool:
    return context.model is not None and context.model.architecture == _GPT_OSS


def _quantization_method(context: ResolutionContext) -> str | None:
    """The quantization method: the user's, or else the checkpoint's."""
    named: str | None = context["quantization"]
    return named or (context.model.quantization if context.model is not None else None)


def _has_mxfp4_kernels(context: ResolutionContext) -> bool:
    return context.device.variant == "sm100" and context.model is not None and context.model.quantization == "mxfp4"


def _gpt_oss_experts(context: ResolutionContext) -> str | None:
    if not _is_gpt_oss(context):
        return None
    if _has_mxfp4_kernels(context):
        return "flashinfer_mxfp4"
    installed = not context.device.versions or _TRITON_PACKAGE in context.device.versions
    return "triton_kernel" if context["ep_size"] == 1 and installed else None


def _cutlass_methods(context: ResolutionContext) -> str | None:
    method = _quantization_method(context)
    if context["moe_runner_backend"] != _CUTLASS or context.model is None or method == "modelopt_fp4":
        return None
    return f"its kernels support experts in modelopt_fp4, not in {method or context.model.dtype}"


def _cutlass_ep_size(context: ResolutionContext) -> str | None:
    if context["moe_runner_backend"] != _CUTLASS or context["ep_size"] in (1, context["tp_size"]):
        return None
    return f"{_CUTLASS} supports an ep_size of 1 or {context['tp_size']} (tp_size)"


def _trtllm_methods(context: ResolutionContext) -> str | None:
    method = _quantization_method(context)
    if context["moe_runner_backend"] != _TRTLLM or context.model is None or method in ("modelopt_fp4", "fp8"):
        return None
    return f"its kernels support experts in modelopt_fp4 or fp8, not in {method or context.model.dtype}"


def _trtllm_shared_experts(context: ResolutionContext) -> str | None:
    if context["moe_runner_backend"] != _TRTLLM or context["disable_shared_experts_fusion"]:
        return None
    return f"{_TRTLLM} runs shared experts separately"


DEFAULTS = (
    Default(
        "moe_runner_backend",
        _gpt_oss_experts,
        "these kernels are the fastest for the experts of GPT-OSS on this device",
        reads=("ep_size",),
    ),
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
    Default(
        "disable_shared_experts_fusion",
        lambda context: True if context["moe_runner_backend"] == _TRTLLM else None,
        f"{_TRTLLM} runs shared experts separately",
        reads=("moe_runner_backend",),
    ),
    published_fraction(),
)

CONTRIBUTIONS = published_contributions()

CONSTRAINTS = (
    Constraint(
        "moe_runner_backend",
        "method_unfit",
        _cutlass_methods,
        "Choose another backend, or a checkpoint in modelopt_fp4.",
        reads=("quantization",),
    ),
    Constraint(
        "ep_size",
        "not_divisible",
        _cutlass_ep_size,
        "Set it to 1 or to tp_size, or choose another moe_runner_backend.",
        reads=("moe_runner_backend", "tp_size"),
    ),
    Constraint(
        "moe_runner_backend",
        "method_unfit",
        _trtllm_methods,
        "Choose another backend, or a checkpoint in modelopt_fp4 or fp8.",
        reads=("quantization",),
    ),
    Constraint(
        "disable_shared_experts_fusion",
        "excluded",
        _trtllm_shared_experts,
        "Leave it out, or set it to true.",
        reads=("moe_runner_backend",),
    ),
    draft_tree_constraint("flashinfer"),
)

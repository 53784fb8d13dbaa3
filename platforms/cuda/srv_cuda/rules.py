"""What NVIDIA GPUs add to the rules of arguments: which kernels run experts, and what those kernels demand."""

from __future__ import annotations

from srv.args.rules.reserve import published, published_fraction
from srv.args.rules.speculative import trees_by_token
from srv.platform.facts import Constraint, Default, Seen

_GPT_OSS = "GptOssForCausalLM"
_CUTLASS, _TRTLLM = "flashinfer_cutlass", "flashinfer_trtllm"
_TRITON_PACKAGE = "triton-kernels"


def _is_gpt_oss(seen: Seen) -> bool:
    return seen.model is not None and seen.model.architecture == _GPT_OSS


def _method(seen: Seen) -> str | None:
    """How the weights are quantized: as the user says, else as the checkpoint does."""
    named: str | None = seen["quantization"]
    return named or (seen.model.quantization if seen.model is not None else None)


def _four_bits_of_their_own(seen: Seen) -> bool:
    return seen.device.variant == "sm100" and seen.model is not None and seen.model.quantization == "mxfp4"


def _gpt_oss_experts(seen: Seen) -> str | None:
    if not _is_gpt_oss(seen):
        return None
    if _four_bits_of_their_own(seen):
        return "flashinfer_mxfp4"
    installed = not seen.device.versions or _TRITON_PACKAGE in seen.device.versions
    return "triton_kernel" if seen["ep_size"] == 1 and installed else None


def _cutlass_methods(seen: Seen) -> str | None:
    method = _method(seen)
    if seen["moe_runner_backend"] != _CUTLASS or seen.model is None or method == "modelopt_fp4":
        return None
    return f"its kernels multiply experts in modelopt_fp4, and these are in {method or seen.model.dtype}"


def _cutlass_ranks(seen: Seen) -> str | None:
    if seen["moe_runner_backend"] != _CUTLASS or seen["ep_size"] in (1, seen["tp_size"]):
        return None
    return f"{_CUTLASS} takes experts whole or one share a rank, 1 or {seen['tp_size']} (tp_size)"


def _trtllm_methods(seen: Seen) -> str | None:
    method = _method(seen)
    if seen["moe_runner_backend"] != _TRTLLM or seen.model is None or method in ("modelopt_fp4", "fp8"):
        return None
    return f"its kernels multiply experts in modelopt_fp4 or fp8, and these are in {method or seen.model.dtype}"


def _trtllm_alone(seen: Seen) -> str | None:
    if seen["moe_runner_backend"] != _TRTLLM or seen["disable_shared_experts_fusion"]:
        return None
    return f"{_TRTLLM} runs shared experts apart from the others"


DEFAULTS = (
    Default(
        "moe_runner_backend",
        _gpt_oss_experts,
        "those kernels run the experts of GPT-OSS best on this device",
        reads=("ep_size",),
    ),
    Default(
        "enable_allreduce_fusion",
        lambda seen: (
            True if _is_gpt_oss(seen) and seen.device.variant == "sm100" and not seen["enable_dp_attention"] else None
        ),
        "GPT-OSS gains from it on compute capability 10.0",
        reads=("enable_dp_attention",),
    ),
    Default(
        "disable_shared_experts_fusion",
        lambda seen: True if seen["moe_runner_backend"] == _TRTLLM else None,
        f"{_TRTLLM} runs shared experts apart from the others",
        reads=("moe_runner_backend",),
    ),
    published_fraction(),
)

CONTRIBUTIONS = published()

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
        _cutlass_ranks,
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
        _trtllm_alone,
        "Leave it out, or set it to true.",
        reads=("moe_runner_backend",),
    ),
    trees_by_token("flashinfer"),
)

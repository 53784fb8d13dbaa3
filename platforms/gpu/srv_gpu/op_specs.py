"""The implementations of each op on GPUs, best first: Triton's kernels, then PyTorch's operators. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from srv.platform.experts import EXPERTS, FP8, INT8, torch_expert_ops
from srv.platform.facts import WRITE_KV, DeviceFacts, OpCall, OpSpec
from srv_gpu import expert_specs
from srv_gpu.facts import HALVES, MISSING_TRITON, TRITON, float_reason, has_package, triton_target
from srv_kernels.triton.targets import FLOAT8_DOTS

TORCH = "torch (reference)"
TRITON_FP8 = "triton_fp8"  # products with FP8 weights for which x is quantized to FP8, too
_LIMITS = {"dim": 1 << 16, "head_dim": 512}  # elements of a row that one program holds in registers
_TORCH_OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "linear_w8a8",
    "linear_w8a8_static",
    "linear_int8",
    "linear_fp8",
)
_RECURRENT_OPS = (
    "causal_conv1d",
    "gated_delta_rule",
    "gated_linear_recurrence",
    "selective_scan",
    "state_space_scan",
)
# PyTorch's operators would dequantize GGUF blocks on the host, and convert a whole output layer to float32, at every
# call, so that they are left out.
_TRITON_OPS = (*_TORCH_OPS, "linear_float32", "linear_gguf", "linear_gguf_float32", "rows_gguf")


def _installed(device: DeviceFacts, call: OpCall) -> str | None:
    return None if has_package(device, TRITON) else MISSING_TRITON


def _triton(device: DeviceFacts, call: OpCall) -> str | None:
    too_large = (
        f"{name} {call.sizes[name]} is more than the {most} elements that a program holds"
        for name, most in _LIMITS.items()
        if call.sizes.get(name, 0) > most
    )
    return _installed(device, call) or float_reason(device, call) or next(too_large, None)


def fp8_products(device: DeviceFacts, call: OpCall) -> str | None:
    """Why x cannot be quantized to float8_e4m3fn for products with FP8 weights."""
    if (missing := _installed(device, call)) is not None:
        return missing
    if (name := triton_target(device.variant)) not in FLOAT8_DOTS:
        return f"{name} has no matrix units for float8_e4m3fn that Triton uses; {', '.join(sorted(FLOAT8_DOTS))} have"
    return None if call.dtype in HALVES else f"{call.dtype} is not one of {', '.join(HALVES)}"


def _any(device: DeviceFacts, call: OpCall) -> None:
    return None


def _impl(op: str, name: str, check: Callable[[DeviceFacts, OpCall], str | None]) -> OpSpec:
    module = "srv_gpu.triton_ops" if name == TRITON else "srv_kernels.reference"
    return OpSpec(op, name, check, f"{module}:{op}", fallback=name == TORCH)


OPS = (
    *(_impl(op, TRITON, _triton) for op in _TRITON_OPS),
    # After Triton's exact products, so that it is used only if fp8_gemm_backend names it: see `srv_gpu.fp8_defaults`.
    OpSpec("linear_fp8", TRITON_FP8, fp8_products, "srv_gpu.triton_ops:linear_fp8_quantized"),
    *(_impl(op, TORCH, float_reason) for op in _TORCH_OPS),
    *expert_specs.OPS,
    *torch_expert_ops(float_reason, (EXPERTS, INT8, FP8)),
    *(OpSpec(op, TORCH, float_reason, f"srv_kernels.recurrent_reference:{op}", fallback=True) for op in _RECURRENT_OPS),
    OpSpec(WRITE_KV, TRITON, _installed),
    OpSpec(WRITE_KV, "torch (index_copy)", _any, fallback=True),
)
# Where every supported PyTorch returns the float32 sums of 16-bit matrices, which logits need. It is preferred there.
FLOAT32_PRODUCTS = OpSpec("linear_float32", "torch (mm)", float_reason, "srv_gpu.ops:linear_float32")

"""The ops that torch_npu's operators implement, and what they take. Torch-free.

Only 16-bit dtypes are offered, since attention on NPUs computes in those alone.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.platform.experts import EXPERTS, INT8, ROUTE, torch_expert_ops
from srv.platform.facts import DeviceFacts, OpCall, OpSpec
from srv_npu.limits import DTYPES

ASCEND = "ascend"  # the backend of experts
_RECURRENT_OPS = ("causal_conv1d", "gated_delta_rule", "gated_linear_recurrence", "selective_scan", "state_space_scan")
MAX_FEATURES = 65535  # input features, and output features, that one npu_quant_matmul takes
_MAX_EXPERTS = 1024  # groups that one npu_grouped_matmul takes
MAX_LISTED = 128  # of which each has a weight of its own, as those with scales or biases need
_MAX_ROUTED = 2048  # experts that npu_moe_gating_top_k takes


def _check_dtype(device: DeviceFacts, call: OpCall) -> str | None:
    if call.dtype in DTYPES:
        return None
    return f"{call.dtype} is not {' or '.join(DTYPES)}, and attention on NPUs computes in those"


def _check_int8(device: DeviceFacts, call: OpCall) -> str | None:
    inputs = call.sizes.get("inputs", 0)
    if inputs > MAX_FEATURES:
        return f"{inputs} input features are more than the {MAX_FEATURES} that npu_quant_matmul takes"
    return _check_dtype(device, call)


def _check_experts(device: DeviceFacts, call: OpCall, most: int = _MAX_EXPERTS) -> str | None:
    for name in ("hidden", "intermediate"):
        if call.sizes.get(name, 0) > MAX_FEATURES:
            return f"{name} {call.sizes[name]} is more than the {MAX_FEATURES} that npu_grouped_matmul takes"
    experts = call.sizes.get("experts", 0)
    if experts > most:
        return f"{experts} experts are more than the {most} that npu_grouped_matmul takes"
    return _check_dtype(device, call)


def _check_int8_experts(device: DeviceFacts, call: OpCall) -> str | None:
    return _check_experts(device, call, MAX_LISTED)


def _check_routing(device: DeviceFacts, call: OpCall) -> str | None:
    experts = call.sizes.get("experts", 0)
    if experts > _MAX_ROUTED:
        return f"{experts} experts are more than the {_MAX_ROUTED} that npu_moe_gating_top_k takes"
    return _check_dtype(device, call)


def _offer(op: str, operator: str, check: Callable[[DeviceFacts, OpCall], str | None] = _check_dtype) -> OpSpec:
    return OpSpec(op, f"torch_npu ({operator})", check)


OPS = (
    _offer("rms_norm", "npu_rms_norm"),
    _offer("add_rms_norm", "npu_add_rms_norm"),
    _offer("rotary", "npu_rotary_mul"),
    _offer("silu_and_mul", "npu_swiglu"),
    _offer("linear_w8a8", "npu_dynamic_quant, npu_quant_matmul", _check_int8),
    _offer("linear_w8a8_static", "npu_quantize, npu_quant_matmul", _check_int8),
    _offer(ROUTE, "npu_moe_gating_top_k", _check_routing),
    OpSpec(EXPERTS, ASCEND, _check_experts),  # npu_grouped_matmul
    OpSpec(INT8, ASCEND, _check_int8_experts),  # npu_dynamic_quant, npu_grouped_matmul
    *torch_expert_ops(_check_dtype, (EXPERTS,)),
    # npu_recurrent_gated_delta_rule takes states of 16 bits alone, and torch_npu has no such convolution.
    *(
        OpSpec(op, "torch (reference)", _check_dtype, f"srv_kernels.recurrent_reference:{op}", fallback=True)
        for op in _RECURRENT_OPS
    ),
)

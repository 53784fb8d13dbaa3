"""The implementations of each op on processors, best first. Torch-free.

Those of "linear" and "linear_float32" that have no target are kernels which `srv_cpu.linear` gives to layers after
loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from srv.platform.experts import EXPERT_OPS, FP8, GGUF, ROUTE, torch_expert_ops
from srv.platform.facts import DeviceFacts, OpCall, OpSpec
from srv.platform.host import minor

NATIVE_KERNELS = "native_kernels"  # a machine feature: the native library of srv-kernels loads
NATIVE, ZENTORCH, IPEX, ONEDNN = "native", "zentorch", "ipex", "oneDNN"
NATIVE_FULL = "native (dequantized)"  # products with blocks that are dequantized some rows at a time
REFERENCE = "torch (reference)"
DISTRIBUTIONS: Mapping[str, str] = {ZENTORCH: "zentorch", IPEX: "intel-extension-for-pytorch"}
NATIVE_DTYPES = ("float32", "bfloat16")
_FLOATS = (*NATIVE_DTYPES, "float16")
_NATIVE_OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_and_mul",
    "linear_w8a8",
    "linear_w8a8_static",
    "linear_int8",
    "linear_gguf",
    "linear_gguf_float32",
    "rows_gguf",
)
_ROUNDED = ("linear_gguf", "linear_gguf_float32", GGUF)
_ROUNDS = "rounds activations to 8 bits"
_NORMS = ("rms_norm", "add_rms_norm")
_REFERENCE_OPS = (*(op for op in _NATIVE_OPS if op not in _NORMS), "gelu_tanh_and_mul", "linear_float32")
_RECURRENT_OPS = (
    "causal_conv1d",
    "gated_delta_rule",
    "gated_linear_recurrence",
    "selective_scan",
    "state_space_scan",
)

Check = Callable[[DeviceFacts, OpCall], str | None]


def mismatch(distribution: str, installed: Mapping[str, str]) -> str | None:
    """Why an optional package is not for this torch, by their versions; None if it is."""
    version, torch_version = installed.get(distribution), installed.get("torch", "")
    if version is None:
        return f"{distribution} is not installed"
    if minor(version) != minor(torch_version):
        return f"{distribution} {version} is for torch {minor(version)}, and this is torch {torch_version}"
    return None


def _dtype_reason(call: OpCall, dtypes: tuple[str, ...]) -> str | None:
    return None if call.dtype in dtypes else f"{call.dtype} is not one of {', '.join(dtypes)}"


def _any_float(device: DeviceFacts, call: OpCall) -> str | None:
    return _dtype_reason(call, _FLOATS)


def _native(device: DeviceFacts, call: OpCall) -> str | None:
    if NATIVE_KERNELS not in device.features:
        return "srv-kernels is installed without native CPU kernels, or they do not load"
    return _dtype_reason(call, NATIVE_DTYPES)


def _onednn(device: DeviceFacts, call: OpCall) -> str | None:
    return _dtype_reason(call, NATIVE_DTYPES)


def _extension(name: str) -> Check:
    def check(device: DeviceFacts, call: OpCall) -> str | None:
        return _dtype_reason(call, NATIVE_DTYPES) or mismatch(DISTRIBUTIONS[name], device.versions)

    return check


def _loaded(op: str) -> OpSpec:
    """The native kernel that layers get after loading."""
    return OpSpec(op, NATIVE, _native, batch_invariant=True)


def _native_op(op: str, module: str) -> OpSpec:
    rounds = _ROUNDS if op in _ROUNDED else ""
    return OpSpec(op, NATIVE, _native, f"srv_kernels.cpu.{module}:{op}", batch_invariant=True, rounds=rounds)


OPS = (
    *(_native_op(op, "native_ops") for op in _NATIVE_OPS),
    *(OpSpec(op, NATIVE_FULL, _native, f"srv_kernels.cpu.native_ops:full_{op}") for op in _ROUNDED if op != GGUF),
    *(OpSpec(op, name, _extension(name), f"srv_cpu.extensions:{name}_{op}") for op in _NORMS for name in DISTRIBUTIONS),
    *(
        OpSpec(op, "torch (cpu.torch_ops)", _any_float, f"srv_kernels.cpu.torch_ops:{op}", fallback=True)
        for op in _NORMS
    ),
    _loaded("linear"),
    OpSpec("linear", ZENTORCH, _extension(ZENTORCH)),
    OpSpec("linear", ONEDNN, _onednn, fallback=True),
    _loaded("linear_float32"),
    *(OpSpec(op, REFERENCE, _any_float, f"srv_kernels.reference:{op}", fallback=True) for op in _REFERENCE_OPS),
    *(_native_op(op, "native_experts") for op in (ROUTE, *EXPERT_OPS) if op != FP8),
    OpSpec(FP8, NATIVE, _native, f"srv_kernels.cpu.native_fp8:{FP8}", batch_invariant=True),
    OpSpec("linear_fp8", NATIVE, _native, "srv_kernels.cpu.native_fp8:linear_fp8", batch_invariant=True),
    OpSpec("linear_fp8", REFERENCE, _any_float, "srv_kernels.reference:linear_fp8", fallback=True),
    *(
        OpSpec(op, REFERENCE, _any_float, f"srv_kernels.recurrent_reference:{op}", fallback=True)
        for op in _RECURRENT_OPS
    ),
    *torch_expert_ops(_any_float),
)

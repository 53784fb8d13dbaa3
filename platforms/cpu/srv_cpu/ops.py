"""The implementations of each op on the CPU platform, best first."""

from __future__ import annotations

from collections.abc import Callable

import torch

from srv.platform.interface import OpArgs, OpImpl
from srv_kernels.cpu.library import load

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NATIVE_FLOATS = (torch.float32, torch.bfloat16)
BLOCK_OPS = ("linear_gguf", "rows_gguf")


def _any_float(args: OpArgs) -> str | None:
    return None if args.dtype in _FLOATS else f"{args.dtype} is not one of float32, bfloat16, float16"


def _native_float(args: OpArgs) -> str | None:
    if args.dtype not in NATIVE_FLOATS:
        return f"{args.dtype} is not one of float32, bfloat16"
    return load().reason or None


def _impl(op: str, module: str, name: str, fits: Callable[[OpArgs], str | None] = _any_float) -> OpImpl:
    return OpImpl(op=op, name=name, supports_args=fits, target=f"srv_kernels.{module}:{op}")


OPS = (
    *(
        _impl(op, "cpu.native_ops", "native", _native_float)
        for op in (
            "rms_norm",
            "add_rms_norm",
            "rotary",
            "silu_and_mul",
            "linear_w8a8",
            "linear_w8a8_static",
            "linear_int8",
            *BLOCK_OPS,
        )
    ),
    _impl("rms_norm", "cpu.torch_ops", "torch (cpu.torch_ops)"),
    _impl("add_rms_norm", "cpu.torch_ops", "torch (cpu.torch_ops)"),
    _impl("rotary", "reference", "torch (reference)"),
    _impl("silu_and_mul", "reference", "torch (reference)"),
    _impl("gelu_tanh_and_mul", "reference", "torch (reference)"),
    _impl("linear_w8a8", "reference", "torch (reference)"),
    _impl("linear_w8a8_static", "reference", "torch (reference)"),
    _impl("linear_int8", "reference", "torch (reference)"),
    *(_impl(op, "reference", "torch (reference)") for op in BLOCK_OPS),
)

"""The implementations of each op on GPUs, best first: Triton's kernels, then PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable

import torch

from srv.platform.interface import OpArgs, OpImpl

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ROW = 1 << 16  # elements of a row that one program of a norm holds in registers
_HEAD = 512
_TORCH_OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "linear_w8a8",
    "linear_w8a8_static",
    "linear_int8",
)
# PyTorch's operators would dequantize GGUF blocks on the host at every call, so that they are left out.
_TRITON_OPS = (*_TORCH_OPS, "linear_gguf", "rows_gguf")


def _float(args: OpArgs) -> str | None:
    return None if args.dtype in _FLOATS else f"{args.dtype} is not one of float32, bfloat16, float16"


def _triton(args: OpArgs) -> str | None:
    limits = {"dim": _ROW, "head_dim": _HEAD}
    too_large = (
        f"{name} {args.sizes[name]} is more than the {most} elements that a program holds"
        for name, most in limits.items()
        if args.sizes.get(name, 0) > most
    )
    return _float(args) or next(too_large, None)


def _without_triton(args: OpArgs) -> str:
    return "the package triton is not installed"


def implementations(has_triton: bool) -> tuple[OpImpl, ...]:
    """All implementations; without Triton, those of its kernels refuse with that reason."""
    fits: Callable[[OpArgs], str | None] = _triton if has_triton else _without_triton
    return (
        *(OpImpl(op, "triton", fits, f"srv_gpu.triton_ops:{op}") for op in _TRITON_OPS),
        *(OpImpl(op, "torch (reference)", _float, f"srv_kernels.reference:{op}") for op in _TORCH_OPS),
    )

"""Which implementation of each op the CPU platform offers, best first."""

from __future__ import annotations

import torch

from srv.platform.interface import OpArgs, OpImpl

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _floats(args: OpArgs) -> str | None:
    return None if args.dtype in _DTYPES else f"{args.dtype} is not one of float32, bfloat16, float16"


def _impl(op: str, module: str) -> OpImpl:
    return OpImpl(op=op, name=f"torch ({module})", supports_args=_floats, target=f"srv_kernels.{module}:{op}")


OPS = (
    _impl("rms_norm", "cpu.torch_ops"),
    _impl("add_rms_norm", "cpu.torch_ops"),
    _impl("rotary", "reference"),
    _impl("silu_and_mul", "reference"),
)

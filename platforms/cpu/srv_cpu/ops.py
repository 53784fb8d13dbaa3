"""Which implementation of each op the CPU platform offers, best first."""

from __future__ import annotations

import torch

from srv.platform.interface import OpArgs, OpImpl

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _floats(args: OpArgs) -> str | None:
    return None if args.dtype in _DTYPES else f"{args.dtype} is not one of float32, bfloat16, float16"


OPS = tuple(
    OpImpl(op=name, name="torch", supports_args=_floats, target=f"srv_kernels.reference:{name}")
    for name in ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul")
)

"""The model's ops through torch_npu's operators, with plain torch where an operator does not reach.

Owns the translation between the signatures of `srv_kernels.contracts` and those of torch_npu. The operators want
contiguous inputs and have kernels for 16 bits; the platform computes in those alone, since its attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from srv.platform.interface import OpArgs, OpImpl
from srv_npu.sdk import Sdk

_DTYPES = (torch.float16, torch.bfloat16)


class Operators:
    """torch_npu's operators under the signatures of the contracts; the SDK is loaded by the first call."""

    def __init__(self, sdk: Callable[[], Sdk]) -> None:
        self._sdk = sdk

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., D], weight [D] -> [..., D]."""
        out: Tensor = self._sdk().npu_rms_norm(x.contiguous(), weight, eps)[0]
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x, residual [..., D], weight [D] -> (rms_norm(residual + x), residual + x)."""
        normed, _, total = self._sdk().npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight, eps)
        return normed, total

    def rotary(self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, H, D], k [T, KV, D], cos_sin float32 [P, R], positions int64 [T] -> (q', k')."""
        angles = cos_sin.index_select(0, positions).to(q.dtype)
        cos, sin = (torch.cat((half, half), -1)[None, :, None] for half in angles.chunk(2, -1))
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, N, D]; cos, sin [1, T, 1, R], each half twice. Entries from R on stay."""
        turned = cos.shape[-1]
        part: Tensor = self._sdk().npu_rotary_mul(x[None, ..., :turned].contiguous(), cos, sin)
        return part[0] if turned == x.shape[-1] else torch.cat((part[0], x[..., turned:]), -1)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [..., 2 I] -> [..., I]: silu of the first half times the second."""
        out: Tensor = self._sdk().npu_swiglu(x.contiguous(), -1)
        return out

    def linear_w8a8(self, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] or None -> [T, N]."""
        return self.dynamic_product(x, weight.t(), weight_scale, bias)

    def dynamic_product(self, x: Tensor, columns: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        """The same of a weight that lies as int8 [K, N], in whatever format."""
        sdk = self._sdk()
        steps, scale = sdk.npu_dynamic_quant(x.contiguous())
        out: Tensor = sdk.npu_quant_matmul(
            steps, columns, weight_scale, pertoken_scale=scale, bias=bias, output_dtype=x.dtype
        )
        return out

    def linear_w8a8_static(
        self,
        x: Tensor,
        weight: Tensor,
        input_scale: Tensor,
        input_offset: Tensor,
        quant_bias: Tensor,
        deq_scale: Tensor,
    ) -> Tensor:
        """x [T, K], weight int8 [N, K], input_scale, input_offset float32 [1], quant_bias int32 [N],
        deq_scale float32 [N] -> [T, N].
        """
        return self.static_product(x, weight.t(), 1 / input_scale, input_offset, quant_bias, deq_scale)

    def static_product(
        self,
        x: Tensor,
        columns: Tensor,
        per_input: Tensor,
        input_offset: Tensor,
        quant_bias: Tensor,
        deq_scale: Tensor,
    ) -> Tensor:
        """The same of a weight that lies as int8 [K, N], in whatever format; `per_input` is 1 / input_scale."""
        sdk = self._sdk()
        steps = sdk.npu_quantize(x.contiguous(), per_input, input_offset, torch.qint8, -1, False)
        out: Tensor = sdk.npu_quant_matmul(steps, columns, deq_scale, bias=quant_bias, output_dtype=x.dtype)
        return out


def implementations(sdk: Callable[[], Sdk]) -> tuple[OpImpl, ...]:
    """What `Platform.ops` offers."""
    operators = Operators(sdk)

    def offer(op: str, operator: str, target: Callable[..., Any]) -> OpImpl:
        return OpImpl(op=op, name=f"torch_npu ({operator})", supports_args=_sixteen_bits, target=target)

    return (
        offer("rms_norm", "npu_rms_norm", operators.rms_norm),
        offer("add_rms_norm", "npu_add_rms_norm", operators.add_rms_norm),
        offer("rotary", "npu_rotary_mul", operators.rotary),
        offer("silu_and_mul", "npu_swiglu", operators.silu_and_mul),
        offer("linear_w8a8", "npu_dynamic_quant, npu_quant_matmul", operators.linear_w8a8),
        offer("linear_w8a8_static", "npu_quantize, npu_quant_matmul", operators.linear_w8a8_static),
    )


def _sixteen_bits(args: OpArgs) -> str | None:
    if args.dtype in _DTYPES:
        return None
    return f"{args.dtype} is not float16 or bfloat16, and attention on NPUs computes in those"

"""The model's ops through torch_npu's operators, with plain torch where an operator does not reach.

Owns the translation between the signatures of `srv_kernels.contracts` and those of torch_npu. The operators want
contiguous inputs, except those that round to 8 bits, and have kernels for 16 bits; the platform computes in those
alone, since its attention does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from srv.platform.interface import OpArgs, OpImpl
from srv_npu.sdk import Sdk

_DTYPES = (torch.float16, torch.bfloat16)
_MOST = 65535  # inputs, and outputs, that one int8 product takes
_PIECE = _MOST // 32 * 32  # FRACTAL_NZ holds int8 outputs in blocks of 32


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
        return self.dynamic_product(x, in_columns(weight), weight_scale, bias)

    def dynamic_product(
        self, x: Tensor, columns: Sequence[Tensor], weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """The same of a weight that lies as `in_columns` gives it, in whatever format."""
        steps, row_scale = self._sdk().npu_dynamic_quant(x)
        # The operator adds a bias of float32 or bfloat16, in float32; float16 it does not take.
        late = None if bias is None else bias.float()
        return self._product(steps, columns, weight_scale, late, output_dtype=x.dtype, pertoken_scale=row_scale)

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
        return self.static_product(x, in_columns(weight), 1 / input_scale, input_offset, quant_bias, deq_scale)

    def static_product(
        self,
        x: Tensor,
        columns: Sequence[Tensor],
        per_input: Tensor,
        input_offset: Tensor,
        quant_bias: Tensor,
        deq_scale: Tensor,
    ) -> Tensor:
        """The same of a weight that lies as `in_columns` gives it, in whatever format; `per_input` is 1 / input_scale.

        The operator wants scale and offset in the dtype of its input. Rounding those to 16 bits would move every
        step, so the input is widened: one more pass over x, which is written and read again in 4 bytes an entry.
        """
        steps = self._sdk().npu_quantize(x.float(), per_input, input_offset, torch.qint8, -1, False)
        return self._product(steps, columns, deq_scale, quant_bias, output_dtype=x.dtype)

    def _product(
        self, steps: Tensor, columns: Sequence[Tensor], scale: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        """steps int8 [T, K] times every piece of a weight, side by side: [T, N]. scale, bias: [N]."""
        scales = torch.split(scale, _PIECE)
        biases = (None,) * len(columns) if bias is None else torch.split(bias, _PIECE)
        multiply = self._sdk().npu_quant_matmul
        parts = [
            multiply(steps, piece, each, bias=added, **options)
            for piece, each, added in zip(columns, scales, biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def in_columns(weight: Tensor) -> tuple[Tensor, ...]:
    """A weight int8 [N, K] as the operator reads it: views [K, n] whose n add up to N.

    More than one where a product does not take so many outputs, as for the head of a large vocabulary.
    """
    return tuple(piece.t() for piece in torch.split(weight, _PIECE))


def implementations(operators: Operators) -> tuple[OpImpl, ...]:
    """What `Platform.ops` offers."""

    def offer(
        op: str, operator: str, target: Callable[..., Any], supports: Callable[[OpArgs], str | None] = _sixteen_bits
    ) -> OpImpl:
        return OpImpl(op=op, name=f"torch_npu ({operator})", supports_args=supports, target=target)

    return (
        offer("rms_norm", "npu_rms_norm", operators.rms_norm),
        offer("add_rms_norm", "npu_add_rms_norm", operators.add_rms_norm),
        offer("rotary", "npu_rotary_mul", operators.rotary),
        offer("silu_and_mul", "npu_swiglu", operators.silu_and_mul),
        offer("linear_w8a8", "npu_dynamic_quant, npu_quant_matmul", operators.linear_w8a8, _narrow),
        offer("linear_w8a8_static", "npu_quantize, npu_quant_matmul", operators.linear_w8a8_static, _narrow),
    )


def _sixteen_bits(args: OpArgs) -> str | None:
    if args.dtype in _DTYPES:
        return None
    return f"{args.dtype} is not float16 or bfloat16, and attention on NPUs computes in those"


def _narrow(args: OpArgs) -> str | None:
    inputs = args.sizes.get("inputs", 0)
    if inputs > _MOST:
        return f"{inputs} inputs are more than the {_MOST} of npu_quant_matmul"
    return _sixteen_bits(args)

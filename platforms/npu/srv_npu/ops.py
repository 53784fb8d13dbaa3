"""Model ops implemented with torch_npu's operators.

It adapts the signatures of `srv_kernels.contracts` to those of torch_npu. The operators need contiguous inputs, except
those that quantize to int8. `op_specs` says which dtypes and sizes they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from srv.platform import ops
from srv.platform.facts import DeviceFacts
from srv.platform.interface import OpImpl
from srv_npu.experts import ExpertOperators
from srv_npu.op_specs import MAX_FEATURES, OPS

_SHARD = MAX_FEATURES // 32 * 32  # FRACTAL_NZ stores int8 output features in blocks of 32


class Operators(ExpertOperators):
    """torch_npu's operators with the signatures of the contracts; the first call loads the SDK."""

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
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, N, D]; cos, sin [1, T, 1, R], each with its half repeated. Entries from R on are not rotated."""
        rotary_dim = cos.shape[-1]
        part: Tensor = self._sdk().npu_rotary_mul(x[None, ..., :rotary_dim].contiguous(), cos, sin)
        return part[0] if rotary_dim == x.shape[-1] else torch.cat((part[0], x[..., rotary_dim:]), -1)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [..., 2 I] -> [..., I]: silu of the first half times the second."""
        out: Tensor = self._sdk().npu_swiglu(x.contiguous(), -1)
        return out

    def linear_w8a8(self, x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K], weight int8 [N, K], weight_scale float32 [N], bias [N] or None -> [T, N]."""
        return self.linear_w8a8_shards(x, column_shards(weight), weight_scale, bias)

    def linear_w8a8_shards(
        self, x: Tensor, shards: Sequence[Tensor], weight_scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`linear_w8a8` for a weight already in the shards of `column_shards`, in ND or FRACTAL_NZ format."""
        quantized, token_scale = self._sdk().npu_dynamic_quant(x)
        # The operator takes a float32 or bfloat16 bias, added in float32, but no float16 one.
        wide_bias = None if bias is None else bias.float()
        return self._quant_matmul(
            quantized, shards, weight_scale, wide_bias, output_dtype=x.dtype, pertoken_scale=token_scale
        )

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
        return self.linear_w8a8_static_shards(
            x, column_shards(weight), 1 / input_scale, input_offset, quant_bias, deq_scale
        )

    def linear_w8a8_static_shards(
        self,
        x: Tensor,
        shards: Sequence[Tensor],
        inverse_scale: Tensor,
        input_offset: Tensor,
        quant_bias: Tensor,
        deq_scale: Tensor,
    ) -> Tensor:
        """`linear_w8a8_static` for a weight already in the shards of `column_shards`, in ND or FRACTAL_NZ format.

        inverse_scale: 1 / input_scale. The operator needs scale and offset in the dtype of its input. Rounding them to
        16 bits would change every quantized value, so x is converted to float32: one more pass over x, with 4 bytes
        per element.
        """
        quantized = self._sdk().npu_quantize(x.float(), inverse_scale, input_offset, torch.qint8, -1, False)
        return self._quant_matmul(quantized, shards, deq_scale, quant_bias, output_dtype=x.dtype)

    def _quant_matmul(
        self, quantized: Tensor, shards: Sequence[Tensor], scale: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        """quantized int8 [T, K] times every shard of a weight, concatenated: [T, N]. scale, bias: [N]."""
        scales = torch.split(scale, _SHARD)
        biases = (None,) * len(shards) if bias is None else torch.split(bias, _SHARD)
        multiply = self._sdk().npu_quant_matmul
        parts = [
            multiply(quantized, shard, factor, bias=added, **options)
            for shard, factor, added in zip(shards, scales, biases, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def column_shards(weight: Tensor) -> tuple[Tensor, ...]:
    """An int8 weight [N, K] as the operator reads it: views [K, n] whose n add up to N.

    There is more than one if N exceeds what the operator takes, as in the LM head of a large vocabulary.
    """
    return tuple(shard.t() for shard in torch.split(weight, _SHARD))


def implementations(operators: Operators, device: DeviceFacts) -> tuple[OpImpl, ...]:
    """The value of `Platform.ops`: what `srv_npu.op_specs` lists."""
    targets = {(spec.op, spec.name): getattr(operators, spec.op) for spec in OPS if not spec.target}
    return ops.implementations(OPS, device, targets)

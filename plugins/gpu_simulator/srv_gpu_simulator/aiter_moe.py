"""aiter.fused_moe and aiter.ops.shuffle: a mixture of experts with unquantized weights, and their layout.

Refusals are ValueErrors, or AssertionErrors where aiter asserts.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from srv_gpu_simulator.checks import HALVES, Rules
from srv_gpu_simulator.device import Accelerator
from srv_gpu_simulator.expert_products import check_choice, check_weights, mix, silu

_ROWS, _COLUMNS = 16, 32  # of a block of `shuffle_weight`
_VECTOR_BYTES = 16


class ActivationType(Enum):
    """aiter.ActivationType."""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(Enum):
    """aiter.QuantType."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


class FusedMoe:
    """The module `aiter.fused_moe`, for one simulated GPU."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def fused_moe(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weight: Tensor,
        topk_ids: Tensor,
        expert_mask: Tensor | None = None,
        activation: ActivationType = ActivationType.Silu,
        quant_type: QuantType = QuantType.No,
        doweight_stage1: bool = False,
        w1_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        a1_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        block_size_M: int | None = None,
        num_local_tokens: Tensor | None = None,
        moe_sorting_dispatch_policy: int = 0,
        dtype: torch.dtype | None = None,
        hidden_pad: int = 0,
        intermediate_pad: int = 0,
        bias1: Tensor | None = None,
        bias2: Tensor | None = None,
        splitk: int = 0,
    ) -> Tensor:
        """[T, H] like hidden_states. w1: [E, 2 I, H], the gate first; w2: [E, H, I]; both from `shuffle_weight`."""
        rules = Rules("fused_moe")
        absent: dict[str, Any] = {
            "expert_mask": expert_mask, "w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale,
            "a2_scale": a2_scale, "num_local_tokens": num_local_tokens, "dtype": dtype, "bias1": bias1, "bias2": bias2,
            "block_size_M": block_size_M, "doweight_stage1": doweight_stage1 or None, "splitk": splitk or None,
            "hidden_pad": hidden_pad or None, "intermediate_pad": intermediate_pad or None,
            "moe_sorting_dispatch_policy": moe_sorting_dispatch_policy or None,
        }  # fmt: skip
        for name, value in absent.items():
            rules.require(value is None, name, "given", "but is not simulated: leave it out", NotImplementedError)
        only = "is not simulated"
        rules.require(activation is ActivationType.Silu, "activation", activation, only, NotImplementedError)
        rules.require(quant_type is QuantType.No, "quant_type", quant_type, only, NotImplementedError)
        rules.on_device(hidden_states=hidden_states, w1=w1, w2=w2, topk_weight=topk_weight, topk_ids=topk_ids)
        rules.dtype("hidden_states", hidden_states.dtype, HALVES)
        check_weights(rules, hidden_states, w1, w2, ("hidden_states", "w1", "w2"))
        for name, weight in (("w1", w1), ("w2", w2)):
            shuffled = getattr(weight, "is_shuffled", False)
            rules.require(shuffled, name, "not shuffled", "only weights from shuffle_weight are simulated")
        check_choice(rules, hidden_states.shape[0], topk_ids, topk_weight, ("topk_ids", "topk_weight"))
        out = torch.empty_like(hidden_states)
        self._accelerator.launch("aiter.fused_moe", _mix, out, hidden_states, topk_ids, topk_weight, w1, w2)
        return out


class Shuffle:
    """The module `aiter.ops.shuffle`."""

    def shuffle_weight(self, x: Tensor, layout: tuple[int, int] = (16, 16)) -> Tensor:
        """A copy of weights [..., N, K] in blocks of 16 rows and 32 columns, as the matrix cores read them."""
        rules = Rules("shuffle_weight")
        rules.require(layout == (16, 16), "layout", layout, "only (16, 16) is simulated", NotImplementedError)
        for axis, multiple in ((-2, _ROWS), (-1, _COLUMNS)):
            size = x.shape[axis]
            rules.require(size % multiple == 0, "x", f"of {size}", f"must be a multiple of {multiple}", AssertionError)
        shuffled = _blocks(x, x.shape).permute(0, 1, 3, 4, 2, 5).contiguous().view(x.shape)
        shuffled.is_shuffled = True  # type: ignore[attr-defined]
        return shuffled


def _blocks(x: Tensor, shape: torch.Size) -> Tensor:
    """[matrices, blocks of rows, 16, blocks of columns, vectors, elements of a vector]."""
    vector = _VECTOR_BYTES // x.element_size()
    return x.view(-1, shape[-2] // _ROWS, _ROWS, shape[-1] // _COLUMNS, _COLUMNS // vector, vector)


def _restored(x: Tensor) -> Tensor:
    vector = _VECTOR_BYTES // x.element_size()
    blocks = x.view(-1, x.shape[-2] // _ROWS, x.shape[-1] // _COLUMNS, _COLUMNS // vector, _ROWS, vector)
    return blocks.permute(0, 1, 4, 2, 3, 5).contiguous().view(x.shape)


def _mix(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> None:
    first, second = _restored(first), _restored(second)
    mix("fused_moe", out, x, ids, weights, first, second, (None, None), lambda gate_up, expert: silu(gate_up))

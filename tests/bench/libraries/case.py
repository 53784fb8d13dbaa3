"""What a library makes of one weight, and the weights that are given to all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LAYER = "model.layers.0.mlp.down_proj"
INPUTS = 64


class Case(NamedTuple):
    """What a library made. `weights`: what it dequantizes the tensors of each layer to, in float32."""

    library: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


Cases = Iterator[tuple[str, Case]]


def random_weight(outputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(outputs, INPUTS, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)


def small_scales(outputs: int, groups: int) -> Tensor:
    return (4 + torch.arange(outputs * groups).view(outputs, groups) % 4) / 512.0


def full_range(outputs: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight whose groups have `small_scales` and all 16 integers of 4 bits, those scales, and zeros from 4 to 11."""
    groups = INPUTS // group
    codes = (torch.arange(outputs)[:, None] * 5 + torch.arange(INPUTS) * 7) % 16
    zeros = 4 + torch.arange(outputs * groups).view(outputs, groups) * 3 % 8
    scales = small_scales(outputs, groups)
    wide = [tensor.repeat_interleave(group, 1) for tensor in (scales, zeros)]
    return (codes - wide[1]) * wide[0], scales, zeros


def llama(outputs: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": outputs, "intermediate_size": INPUTS, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(dtype)

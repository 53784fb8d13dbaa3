"""Unpacks words of 32 bits into integers, and packs these into the quantization blocks of GGUF files.

Owns the order of integers in words, and of values in blocks. Must not know checkpoints.
(Sources: the packing code of AutoAWQ and GPTQModel, `compressed_tensors.compressors.pack_quantized`, ggml's
`ggml-common.h`)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# AWQ: the output that each field of a word, the lowest first, belongs to; by the bits of a field.
_AWQ_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_BLOCK = 32


def unpack(words: Tensor, bits: int, axis: Literal[0, 1], *, interleaved: bool = False) -> Tensor:
    """The integers in words, the lowest bits first: int32 [rows, columns] -> uint8, longer along `axis`.

    `interleaved`: the order of AWQ's kernels.
    """
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    if interleaved:
        shifts = shifts[torch.tensor(_AWQ_ORDER[bits], device=words.device).argsort()]
    fields: Tensor = ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8)  # [rows, columns, per word]
    if axis == 1:
        return fields.flatten(1)
    return fields.transpose(1, 2).reshape(words.shape[0] * per_word, words.shape[1])


def blocks(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, least: Tensor | None = None) -> Tensor:
    """Rows of GGUF blocks: uint8 [N, bytes], from integers uint8 [N, K] in groups of consecutive inputs.

    scales: float16 [N, groups]. zeros: uint8 [N, groups]; None if all are the middle of the range. least: float16
    [N, groups], what an integer of 0 stands for, in place of zeros. 4 bits become Q4_0 or, with zeros or least values,
    Q4_1; 8 bits become Q8_0.
    """
    outputs, inputs = values.shape
    count = inputs // _BLOCK
    of_block = torch.arange(count, device=values.device) * _BLOCK // (-(-inputs // scales.shape[1]))
    factors = [scales[:, of_block]]
    if zeros is not None:
        least = (-scales.float() * zeros).to(torch.float16)
    if least is not None:
        factors.append(least[:, of_block])
    heads = [factor.contiguous().view(torch.uint8).view(outputs, count, 2) for factor in factors]
    if bits == 8:
        body = (values ^ 0x80).view(outputs, count, _BLOCK)  # value - 128, as int8
    else:
        halves = values.view(outputs, count, 2, _BLOCK // 2)
        body = halves[:, :, 0] | (halves[:, :, 1] << 4)
    return torch.cat((*heads, body), -1).view(outputs, -1)

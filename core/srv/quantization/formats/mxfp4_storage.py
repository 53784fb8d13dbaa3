"""The conversion of weights in MXFP4 to GGUF's blocks.

The blocks and the scales of a tensor are collected, and become rows when both are there. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.quantization.formats.block_codes import E2M1, codes_of, in_blocks
from srv.quantization.formats.mxfp4 import (
    BLOCK,
    BLOCK_TYPE,
    PAIRS,
    PROJECTIONS,
    check_tensors,
)
from srv.quantization.method import DOWNLOAD_REMEDY, StoredModel

_SIZE = TYPES_BY_NAME[BLOCK_TYPE].size
_BIAS = 127  # of the exponents of scales
_NAN = 255  # the scale of a block that is not a number
_PART_OF = {suffix: part for part, pair in PAIRS.items() for suffix in pair}


class MXFP4StorageFormat(StorageFormat):
    """Blocks and scales, of a layer or of all experts, which become `weight` of each layer."""

    def __init__(self, model: StoredModel) -> None:
        self._model, self._path = model, model.facts.path
        self._shapes: dict[str, tuple[int, ...]] = {}  # [experts], outputs, inputs; by the name without a suffix
        self._groups = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        owner, part, _ = self._split(name)
        if not part:
            return (name,)
        return self._targets(owner, part)

    def _targets(self, owner: str, part: str) -> tuple[str, ...]:
        if part == "weight":
            return (f"{owner}.weight",)
        count = self._shapes.get(f"{owner}.{part}", (0,))[0]
        return tuple(
            f"{owner}.{expert}.{projection}.weight" for expert in range(count) for projection in PROJECTIONS[part]
        )

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        loaded: dict[str, tuple[int, ...]] = {}
        tensors: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        for name, shape in stored.items():
            owner, part, suffix = self._split(name)
            if part:
                tensors.setdefault((owner, part), {})[suffix] = shape
            else:
                loaded[name] = shape
        for (owner, part), shapes in tensors.items():
            shape = self._shapes[f"{owner}.{part}"] = check_tensors(self._model, owner, part, shapes)
            *_, outputs, inputs = shape
            rows = outputs // len(PROJECTIONS.get(part, (part,)))
            width = inputs if self._model.dequantize else inputs // BLOCK * _SIZE
            loaded |= dict.fromkeys(self._targets(owner, part), (rows, width))
        return loaded

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        owner, part, suffix = self._split(name)
        if not part:
            return {name: stored}
        pair = self._groups.add(f"{owner}.{part}", suffix, stored, len(PAIRS[part]))
        return {} if pair is None else self._rows(owner, part, *(pair[kind] for kind in PAIRS[part]))

    def _split(self, name: str) -> tuple[str, str, str]:
        """The owner of a tensor, which of its weights it belongs to, and its suffix; "" for all other tensors."""
        owner, _, suffix = name.rpartition(".")
        part = _PART_OF.get(suffix, "")
        return (owner, part, suffix) if part else (name, "", "")

    def _rows(self, owner: str, part: str, blocks: Tensor, scales: Tensor) -> dict[str, Tensor]:
        if bool((scales == _NAN).any()):
            self._fail("damaged", f"a scale in {owner}.{PAIRS[part][1]} is {_NAN}, which is not a number")
        rows_of = _dequantized if self._model.dequantize else _blocks
        if part == "weight":
            return {f"{owner}.weight": rows_of(blocks.view(*blocks.shape[:-1], -1, BLOCK // 2), scales)}
        weights: dict[str, Tensor] = {}
        count = len(PROJECTIONS[part])
        for expert, (stored, factors) in enumerate(zip(blocks, scales, strict=True)):
            rows = rows_of(stored, factors)
            for index, projection in enumerate(PROJECTIONS[part]):
                weights[f"{owner}.{expert}.{projection}.weight"] = rows[index::count]
        return weights

    def _fail(self, code: str, reason: str) -> NoReturn:
        raise ModelError(code, self._path, reason, DOWNLOAD_REMEDY)


def _blocks(stored: Tensor, scales: Tensor) -> Tensor:
    """uint8 [N, G, 16] with neighbouring weights in a byte, scales [N, G] -> GGUF's rows [N, G * 17]."""
    return torch.cat((scales.unsqueeze(-1), in_blocks(codes_of(stored)).squeeze(-2)), -1).flatten(1)


def _dequantized(stored: Tensor, scales: Tensor) -> Tensor:
    """As `_blocks` -> float32 [N, K]: the values of E2M1 times powers of 2, exactly."""
    values = F.embedding(codes_of(stored).int(), torch.tensor(E2M1).unsqueeze(1)).squeeze(-1)  # [N, G, 32]
    return torch.ldexp(values, scales.int().unsqueeze(-1) - _BIAS).flatten(1)

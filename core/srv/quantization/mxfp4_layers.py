"""The layers of checkpoints with weights in MXFP4, and the conversion of their tensors to GGUF's blocks.

The blocks and the scales of a tensor are collected, and become rows when both are there. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.formats.gguf_types import TYPES_BY_NAME
from srv.models.formats.storage import StorageFormat, TensorGroups
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LayerFactory
from srv.models.layers.linear import Projection, Split
from srv.models.layers.moe_config import expert_names
from srv.quantization.block_codes import codes_of, in_blocks
from srv.quantization.gguf_experts import GGUFExperts
from srv.quantization.gguf_layers import GGUFLinear, empty_matrix
from srv.quantization.method import StoredModel
from srv.quantization.mxfp4 import BLOCK, BLOCK_TYPE, FUSED, PACKED, REMEDY, SCALE, are_quantized

_REMEDY = "Download the checkpoint again, or use another one of the model"
_SIZE = TYPES_BY_NAME[BLOCK_TYPE].size
_NAN = 255  # the scale of a block that is not a number
# The suffixes of a tensor's blocks and of its scales, and what stands before them in its name.
_PAIRS = {**{part: (f"{part}_blocks", f"{part}_scales") for part in FUSED}, "weight": (PACKED, SCALE)}
_PART_OF = {suffix: part for part, pair in _PAIRS.items() for suffix in pair}
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class MXFP4LayerFactory(LayerFactory):
    """Layers with blocks where the checkpoint has MXFP4; embeddings are not quantized."""

    def __init__(self, context: BuildContext, model: StoredModel) -> None:
        super().__init__(context)
        self._model = model

    def linear(
        self, output_sizes: Mapping[str, int], inputs: int, bias: bool, split: Split | None = None, unit: int = 1
    ) -> Projection:
        if not are_quantized(self._model, tuple(output_sizes), inputs):
            return super().linear(output_sizes, inputs, bias, split, unit)
        matrix = empty_matrix(self.context, sum(output_sizes.values()), inputs, BLOCK_TYPE)
        return GGUFLinear(self.context, output_sizes, [matrix], bias)

    def experts(self, prefix: str, sizes: ExpertSizes, bias: bool = False) -> ExpertWeights:
        """Raises ModelError for experts of which some projections are quantized and others not."""
        named = zip(expert_names(prefix, sizes.experts), (sizes.hidden, sizes.intermediate), strict=True)
        kept = [are_quantized(self._model, names, inputs) for names, inputs in named]
        if not any(kept):
            return super().experts(prefix, sizes, bias)
        if not all(kept):
            reason = f"the experts {prefix} are quantized in part, which no layers support"
            raise ModelError("unsupported_quantization", self._model.facts.path, reason, REMEDY)
        return GGUFExperts(self.context, prefix, self.local_experts(sizes), BLOCK_TYPE, BLOCK_TYPE, bias)


class MXFP4StorageFormat(StorageFormat):
    """Blocks and scales, of a layer or of all experts, which become `weight` of each layer."""

    def __init__(self, model: StoredModel) -> None:
        self._path = model.facts.path
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
        return tuple(f"{owner}.{expert}.{each}.weight" for expert in range(count) for each in _PROJECTIONS[part])

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        tensors: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        for name, shape in stored.items():
            owner, part, suffix = self._split(name)
            if part:
                tensors.setdefault((owner, part), {})[suffix] = shape
            else:
                found[name] = shape
        for (owner, part), shapes in tensors.items():
            shape = self._shapes[f"{owner}.{part}"] = self._check(owner, part, shapes)
            *_, outputs, inputs = shape
            rows = outputs // len(_PROJECTIONS.get(part, (part,)))
            found |= dict.fromkeys(self._targets(owner, part), (rows, inputs // BLOCK * _SIZE))
        return found

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        owner, part, suffix = self._split(name)
        if not part:
            return {name: stored}
        pair = self._groups.add(f"{owner}.{part}", suffix, stored, len(_PAIRS[part]))
        return {} if pair is None else self._rows(owner, part, *(pair[each] for each in _PAIRS[part]))

    def _split(self, name: str) -> tuple[str, str, str]:
        """The owner of a tensor, which of its weights it belongs to, and its suffix; "" for all other tensors."""
        owner, _, suffix = name.rpartition(".")
        part = _PART_OF.get(suffix, "")
        return (owner, part, suffix) if part else (name, "", "")

    def _check(self, owner: str, part: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[experts], outputs and inputs. Raises ModelError if a tensor is missing, or the shapes do not fit."""
        for suffix in _PAIRS[part]:
            if suffix not in shapes:
                self._fail("missing_tensors", f"it lacks {owner}.{suffix}")
        blocks, scales = (shapes[suffix] for suffix in _PAIRS[part])
        fused = part != "weight"
        if fused:
            expected, fits = blocks[:-1], len(blocks) == 4 and blocks[-1] == BLOCK // 2
            whole = (*blocks[:-2], blocks[-2] * BLOCK) if fits else ()
            fits = fits and blocks[1] % len(_PROJECTIONS[part]) == 0
        else:
            fits = len(blocks) == 2 and blocks[1] % (BLOCK // 2) == 0
            whole = (blocks[0], blocks[1] * 2) if fits else ()
            expected = (blocks[0], blocks[1] * 2 // BLOCK) if fits else ()
        if not fits:
            wanted = f"[experts, outputs, blocks, {BLOCK // 2}]" if fused else f"[outputs, blocks of {BLOCK // 2}]"
            self._fail("shape_mismatch", f"{owner}.{_PAIRS[part][0]} has the shape {list(blocks)}, not {wanted}")
        if scales != expected:
            reason = f"{owner}.{_PAIRS[part][1]} has the shape {list(scales)}, but {list(expected)} fits its blocks"
            self._fail("shape_mismatch", f"{reason} of {BLOCK} weights")
        return whole

    def _rows(self, owner: str, part: str, blocks: Tensor, scales: Tensor) -> dict[str, Tensor]:
        for suffix, tensor in zip(_PAIRS[part], (blocks, scales), strict=True):
            if tensor.dtype != torch.uint8:
                dtype = str(tensor.dtype).removeprefix("torch.")
                self._fail("dtype_mismatch", f"{owner}.{suffix} is stored as {dtype}, not as uint8")
        if bool((scales == _NAN).any()):
            self._fail("damaged", f"a scale in {owner}.{_PAIRS[part][1]} is {_NAN}, which is not a number")
        if part == "weight":
            return {f"{owner}.weight": _blocks(blocks.view(*blocks.shape[:-1], -1, BLOCK // 2), scales)}
        found: dict[str, Tensor] = {}
        count = len(_PROJECTIONS[part])
        for expert, (stored, factors) in enumerate(zip(blocks, scales, strict=True)):
            rows = _blocks(stored, factors)
            for index, each in enumerate(_PROJECTIONS[part]):
                found[f"{owner}.{expert}.{each}.weight"] = rows[index::count]
        return found

    def _fail(self, code: str, reason: str) -> NoReturn:
        raise ModelError(code, self._path, reason, _REMEDY)


def _blocks(stored: Tensor, scales: Tensor) -> Tensor:
    """uint8 [N, G, 16] with neighbouring weights in a byte, scales [N, G] -> GGUF's rows [N, G * 17]."""
    return torch.cat((scales.unsqueeze(-1), in_blocks(codes_of(stored)).squeeze(-2)), -1).flatten(1)

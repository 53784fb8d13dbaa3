"""The conversion of the tensors of checkpoints of bitsandbytes.

The tensors of a layer of 4 bits are collected, and become its rows of blocks when all are there. Scales that are
quantized themselves become float32. Must not know files, except for the shapes of matrices, which are in tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.models.checkpoints.safetensors_file import open_file
from srv.models.checkpoints.safetensors_header import read_checkpoint
from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.quantization.formats.bitsandbytes import (
    BLOCK,
    INT8_FORMAT,
    INT8_SCALE,
    NESTED,
    PLAIN,
    STATE,
    TYPES,
)
from srv.quantization.formats.block_codes import codes_of, in_blocks
from srv.quantization.method import DOWNLOAD_REMEDY, StoredModel

_LEVELS = 127  # of an int8 weight whose magnitude is that of the largest of its row
# The values of codes, which checkpoints have as `quant_map`.
TABLES: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(sign * value / 192 for sign in (1, -1) for value in (0, 1, 128, 192, 64, 96, 32, 48)),
}


class _State(NamedTuple):
    """What is stored of a matrix beside its tensors. kind: "nf4" or "fp4". block: weights per scale."""

    kind: str
    outputs: int
    inputs: int
    block: int
    nested_block: int = 0
    offset: float = 0.0

    @property
    def row_bytes(self) -> int:
        return self.inputs // BLOCK * TYPES_BY_NAME[TYPES[self.kind]].size

    @property
    def scales(self) -> int:
        return self.outputs * self.inputs // self.block

    def expected(self) -> dict[str, int]:
        """The number of elements of each tensor beside the codes."""
        sizes = {"absmax": self.scales, "quant_map": len(TABLES[self.kind])}
        if self.nested_block:
            sizes |= {"nested_absmax": -(-self.scales // self.nested_block), "nested_quant_map": 256}
        return sizes


class BitsAndBytesStorageFormat(StorageFormat):
    """Codes, scales and tables, which become `weight`; int8 weights stay, and their `SCB` becomes `weight_scale`."""

    def __init__(self, model: StoredModel) -> None:
        self._path, self._model = model.facts.path, model
        self._states = self._read_states(model)
        self._groups = TensorGroups()

    def parts(self, name: str) -> tuple[str, ...]:
        owner, suffix = self._split(name)
        if suffix in (INT8_SCALE, INT8_FORMAT):
            return (f"{owner}.{'weight' if self._model.dequantize else 'weight_scale'}",)
        return (owner,) if suffix else (name,)

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        loaded: dict[str, tuple[int, ...]] = {}
        tensors: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in stored.items():
            owner, suffix = self._split(name)
            if suffix == INT8_SCALE:
                if not self._model.dequantize:
                    loaded[f"{owner}.weight_scale"] = (*shape, 1)
            elif suffix == INT8_FORMAT and f"{owner}.{INT8_SCALE}" not in stored:
                self._fail("missing_tensors", f"it lacks {owner}.{INT8_SCALE}")
            elif suffix in (*PLAIN, *NESTED, "codes"):
                tensors.setdefault(owner, {})[suffix] = shape
            elif not suffix:
                loaded[name] = shape
        for owner, shapes in tensors.items():
            self._check(owner, shapes)
            state = self._states[owner]
            loaded[owner] = state.outputs, state.inputs if self._model.dequantize else state.row_bytes
        return loaded

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        owner, suffix = self._split(name)
        if not suffix:
            is_int8 = self._model.dequantize and stored.dtype == torch.int8
            return self._dequantized(name.rpartition(".")[0], "weight", stored) if is_int8 else {name: stored}
        if suffix == INT8_SCALE:
            scale = self._int8_scale(owner, stored)
            return (
                self._dequantized(owner, suffix, scale) if self._model.dequantize else {f"{owner}.weight_scale": scale}
            )
        if suffix == INT8_FORMAT:
            if (order := stored.flatten().tolist()) != [0]:
                self._fail("unsupported_quantization", f"the rows of {owner}.weight are in the order {order}")
            return {}
        if suffix.startswith(STATE):
            return {}
        tensors = self._groups.add(owner, suffix, stored, 1 + len(self._states[owner].expected()))
        return {} if tensors is None else {owner: self._rows(owner, tensors)}

    def _dequantized(self, layer: str, suffix: str, stored: Tensor) -> dict[str, Tensor]:
        """Of int8."""
        group = self._groups.add(layer, suffix, stored, count=2)
        return {} if group is None else {f"{layer}.weight": group["weight"].float() * group[INT8_SCALE]}

    def _split(self, name: str) -> tuple[str, str]:
        """What a tensor belongs to, and its suffix; "codes" for those of a weight, "" for all other tensors.

        Of int8 it is the layer, of 4 bits the weight.
        """
        if name in self._states:
            return name, "codes"
        owner, _, suffix = name.rpartition(".")
        if suffix in (INT8_SCALE, INT8_FORMAT):
            return owner, suffix
        weight, _, state = name.partition(f".{STATE}")
        if state:
            return weight, f"{STATE}{state}"
        return (owner, suffix) if owner.endswith(".weight") and suffix in (*PLAIN, *NESTED) else (name, "")

    def _read_states(self, model: StoredModel) -> dict[str, _State]:
        """Those of all matrices of 4 bits, by the name of the weight."""
        checkpoint = read_checkpoint(Path(self._path)) if model.types else None
        states: dict[str, _State] = {}
        if checkpoint is None:
            return states
        renamed = {stored: name for name, stored in model.stored_names.items()}
        for path, names in checkpoint.files.items():
            state_names = [name for name in names if f".{STATE}" in name]
            if not state_names:
                continue
            with open_file(path, checkpoint.tensors, mapped=False) as file:  # a few bytes of each
                for name in state_names:
                    weight, _, _ = renamed.get(name, name).partition(f".{STATE}")
                    states[weight] = self._state(name, file.get(name, None))
        return states

    def _state(self, name: str, stored: Tensor) -> _State:
        try:
            fields: dict[str, Any] = json.loads(bytes(stored.tolist()))
            outputs, inputs = (int(size) for size in fields["shape"])
            nested = "nested_blocksize" in fields
            state = _State(
                str(fields["quant_type"]),
                outputs,
                inputs,
                int(fields["blocksize"]),
                int(fields["nested_blocksize"]) if nested else 0,
                float(fields["nested_offset"]) if nested else 0.0,
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self._fail("damaged", f"{name} does not describe a matrix ({error!r})")
        if state.kind not in TYPES or state.kind != name.rpartition("__")[2]:
            self._fail("damaged", f"{name} is of type {state.kind!r}, not {' or '.join(TYPES)} as its name")
        if state.block <= 0 or state.block % BLOCK or state.inputs % state.block:
            reason = f"{name} has a scale per {state.block} weights, and rows of {state.inputs}: scales must be of"
            self._fail("unsupported_quantization", f"{reason} multiples of {BLOCK} that divide a row")
        return state

    def _check(self, owner: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ModelError if tensors of a weight are missing, left over, or of other sizes than its state says."""
        state = self._states.get(owner)
        if state is None:
            self._fail("missing_tensors", f"it lacks {owner}.{STATE}nf4 (or fp4)")
        expected = {"codes": state.outputs * state.inputs // 2, **state.expected()}
        for suffix, count in expected.items():
            if suffix not in shapes:
                self._fail("missing_tensors", f"it lacks {owner}{'' if suffix == 'codes' else f'.{suffix}'}")
            # Codes may be stored as another dtype, of which the number of elements is smaller.
            if suffix != "codes" and torch.Size(shapes[suffix]).numel() != count:
                reason = f"{owner}.{suffix} has the shape {list(shapes[suffix])}, but {count} elements fit its weight"
                self._fail("shape_mismatch", f"{reason} of {state.outputs} x {state.inputs} in blocks of {state.block}")
        if extra := sorted(shapes.keys() - expected.keys()):
            self._fail("unexpected_tensors", f"it has {owner}.{extra[0]}, which its quant_state does not state")

    def _rows(self, owner: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """The rows of blocks of a weight whose tensors are complete, or floats."""
        state = self._states[owner]
        stored = tensors["codes"].contiguous().view(-1).view(torch.uint8)
        if stored.numel() * 2 != state.outputs * state.inputs:
            reason = f"{owner} has {stored.numel()} bytes, but {state.outputs} x {state.inputs} weights of 4 bits take"
            self._fail("shape_mismatch", f"{reason} {state.outputs * state.inputs // 2}")
        table = torch.tensor(TABLES[state.kind])
        if not torch.allclose(tensors["quant_map"].float().flatten(), table, rtol=1e-6, atol=1e-7):
            self._fail("damaged", f"{owner}.quant_map is not the table of {state.kind}")
        scales = self._scales(owner, state, tensors)
        codes = codes_of(stored, high_first=True).view(state.outputs, -1, BLOCK)
        if self._model.dequantize:
            factors = scales.repeat_interleave(state.block).view(state.outputs, state.inputs)
            return table[codes.int()].view(state.outputs, state.inputs) * factors
        repeated = scales.repeat_interleave(state.block // BLOCK).view(state.outputs, -1, 1)
        return torch.cat((repeated.contiguous().view(torch.uint8), in_blocks(codes).flatten(-2)), -1).flatten(1)

    def _scales(self, owner: str, state: _State, tensors: Mapping[str, Tensor]) -> Tensor:
        """float32, one per block."""
        absmax = tensors["absmax"].flatten()
        if state.nested_block:
            if absmax.dtype != torch.uint8:
                self._fail("dtype_mismatch", f"{owner}.absmax is stored as {_name(absmax)}, not as uint8")
            outer = tensors["nested_absmax"].float().flatten()
            self._check_magnitudes(f"{owner}.nested_absmax", outer)
            outer = outer.repeat_interleave(state.nested_block)[: absmax.numel()]
            scales = tensors["nested_quant_map"].float().flatten()[absmax.int()] * outer + state.offset
        elif not absmax.is_floating_point():
            self._fail("dtype_mismatch", f"{owner}.absmax is stored as {_name(absmax)}, not as floats")
        else:
            scales = absmax.float()
            self._check_magnitudes(f"{owner}.absmax", scales)
        # Scales that are quantized themselves may be a little below 0, if a block has small weights only.
        if not bool(scales.isfinite().all()):
            self._fail("damaged", f"a scale of {owner} is not a finite number")
        return scales

    def _int8_scale(self, owner: str, stored: Tensor) -> Tensor:
        """float32 [N, 1]."""
        if not stored.is_floating_point():
            self._fail("dtype_mismatch", f"{owner}.{INT8_SCALE} is stored as {_name(stored)}, not as floats")
        self._check_magnitudes(f"{owner}.{INT8_SCALE}", stored)
        return stored.float().unsqueeze(1) / _LEVELS

    def _check_magnitudes(self, name: str, largest: Tensor) -> None:
        """Raises ModelError unless a tensor can be of the largest magnitudes of weights: finite, and not negative."""
        fits = (largest >= 0) & largest.isfinite()
        if not bool(fits.all()):
            wrong = largest[~fits].flatten()[0].item()
            self._fail("damaged", f"{name} has the value {wrong:g}, which is not a finite number from 0 on")

    def _fail(self, code: str, reason: str) -> NoReturn:
        raise ModelError(code, self._path, reason, DOWNLOAD_REMEDY)


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

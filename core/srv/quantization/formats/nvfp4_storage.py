"""The conversion of tensors in NVFP4, and layers of them.

No platform has an op for NVFP4: layers dequantize a part of their weights at a time, and multiply by it as by
unquantized ones. Must not know configurations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.errors import ModelError
from srv.models.checkpoints.slices import Slice
from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.models.layers.context import BuildContext
from srv.models.layers.experts import ExpertSizes, ExpertWeights
from srv.models.layers.factory import LocalSizes
from srv.models.layers.linear import Projection
from srv.models.layers.op_layer import OpLayer
from srv.platform.experts import EXPERTS
from srv.quantization.formats.block_codes import E2M1
from srv.quantization.formats.nvfp4 import GROUP, MATRIX_SCALE, PACKED_DTYPE, NvFp4Checkpoint, nvfp4_schemes
from srv.quantization.layers.factory import SchemeLayers
from srv.quantization.method import DOWNLOAD_REMEDY
from srv.quantization.schemes import SCALE, Scheme

_SUFFIXES = ("weight", SCALE, MATRIX_SCALE)
_COLUMNS_OF = {"weight": 2, SCALE: GROUP}  # columns of the matrix for each stored one
_AT_ONCE = 1 << 20  # weights that are dequantized at a time: 4 MiB in float32, which the caches of processors hold
_LARGEST_SCALE = 0x7E  # the code of 448; above it are NaN and negative numbers


class NvFp4Tensors(StorageFormat):
    """Weights and scales stay as they are stored; the scale of a matrix becomes one for each output.

    Of a model whose weights are dequantized, the three become one weight.
    """

    def __init__(self, checkpoint: NvFp4Checkpoint) -> None:
        self._model, names = checkpoint.model, checkpoint.names
        self._stored_weight, self._input_scale, self._inverse = names.weight, names.input_scale, names.inverse
        # As layers call them, by their names in checkpoints.
        self._suffixes = {names.weight: "weight", SCALE: SCALE, names.matrix_scale: MATRIX_SCALE}
        self._groups, self._tables = TensorGroups(), NvFp4Tables.on(torch.device("cpu"))

    def parts(self, name: str) -> tuple[str, ...]:
        layer, suffix = self._divided(name)
        if suffix not in self._suffixes:
            return (name,)
        return (f"{layer}.{'weight' if self._model.dequantize else self._suffixes[suffix]}",)

    def unused(self, names: Collection[str]) -> set[str]:
        return {name for name in names if self._divided(name)[1] == self._input_scale}

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in stored.items():
            layer, suffix = self._divided(name)
            held = self._suffixes.get(suffix)
            if held is None:
                found[name] = shape
            elif not self._model.dequantize:
                found[f"{layer}.{held}"] = self._outputs(layer) if held == MATRIX_SCALE else shape
            elif held == "weight":
                found[f"{layer}.weight"] = (*shape[:-1], 2 * shape[-1])
        return found

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        layer, suffix = self._divided(name)
        held = self._suffixes.get(suffix)
        match held:
            case None:
                return {name: stored}
            case "weight_scale":
                stored = stored.view(torch.uint8)
                if bool((stored > _LARGEST_SCALE).any()):
                    self._fail(f"a scale in {name} is negative or NaN")
            case "weight_scale_2":
                scale = stored.reciprocal() if self._inverse else stored
                if not bool((scale >= 0).all() & scale.isfinite().all()):
                    bound = "above 0" if self._inverse else "from 0 on"
                    self._fail(f"{name} is {stored.item():g}, which is not a finite number {bound}")
                stored = scale.reshape(1).expand(self._outputs(layer))
        if not self._model.dequantize:
            return {f"{layer}.{held}": stored}
        group = self._groups.add(layer, held, stored, len(_SUFFIXES))
        return {} if group is None else {f"{layer}.weight": self._tables.widened(*(group[each] for each in _SUFFIXES))}

    def _divided(self, name: str) -> tuple[str, str]:
        """The layer and the suffix of a tensor of a quantized layer; the latter is "" for all others."""
        layer, _, suffix = name.rpartition(".")
        return layer, suffix if self._model.types.get(f"{layer}.{self._stored_weight}") == PACKED_DTYPE else ""

    def _outputs(self, layer: str) -> tuple[int, ...]:
        return self._model.shapes[f"{layer}.{self._stored_weight}"][:1]

    def _fail(self, reason: str) -> NoReturn:
        raise ModelError("damaged", self._model.facts.path, reason, DOWNLOAD_REMEDY)


class NvFp4Tables(NamedTuple):
    """float32 on the device: the two values of each byte [256, 2], and that of each code of a scale [256, 1]."""

    pairs: Tensor
    scales: Tensor

    @classmethod
    def on(cls, device: torch.device) -> NvFp4Tables:
        values = torch.tensor(E2M1)
        codes = torch.arange(256, dtype=torch.uint8)
        pairs = torch.stack((values[(codes & 15).int()], values[(codes >> 4).int()]), -1)
        scales = codes.view(torch.float8_e4m3fn).float().unsqueeze(1)
        return cls(pairs.to(device), scales.to(device))

    def widened(self, weight: Tensor, scale: Tensor, matrix_scale: Tensor) -> Tensor:
        """weight uint8 [..., N, K / 2], scale uint8 [..., N, K / 16], matrix_scale [..., N] -> float32 [..., N, K]."""
        groups = F.embedding(weight.int(), self.pairs).view(*scale.shape, GROUP)
        scaled = (groups * F.embedding(scale.int(), self.scales)).flatten(-2)  # exact
        wide: Tensor = scaled * matrix_scale.unsqueeze(-1)
        return wide


class NvFp4Matrix(nn.Module):
    """weight uint8 [..., N, K / 2], scale uint8 [..., N, K / 16], of float8_e4m3fn, and matrix_scale float32 [..., N].

    Scales are bytes, which a table translates, since not every device converts float8_e4m3fn.
    """

    def __init__(self, context: BuildContext, tables: NvFp4Tables, *outputs: int, inputs: int) -> None:
        super().__init__()
        self._tables = tables
        self.weight = context.empty(*outputs, inputs // 2, dtype=torch.uint8)
        self.scale = context.empty(*outputs, inputs // GROUP, dtype=torch.uint8)
        self.matrix_scale = context.empty(*outputs, dtype=torch.float32)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.scale, self.matrix_scale

    def dequantized(self, chosen: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """[n, ..., K]: the weights of a part of the first axis."""
        weight, scale, matrix_scale = (each[chosen] for each in self.tensors)
        return self._tables.widened(weight, scale, matrix_scale).to(dtype)


class NvFp4Linear(Projection):
    """y = x Wᵀ + b; bias [out] of `dtype` (the model's), or None."""

    def __init__(self, context: BuildContext, tables: NvFp4Tables, local: LocalSizes, bias: bool) -> None:
        super().__init__(context.dtype, *local)
        self.matrix = NvFp4Matrix(context, tables, local.outputs, inputs=local.inputs)
        self._loaded_bias = context.empty(local.outputs) if bias else None
        self.bias = self._loaded_bias if self.sharding.adds_bias else None
        self.kernel = self.multiply

    def multiply(self, x: Tensor) -> Tensor:
        outputs, rows = len(self.matrix.weight), max(1, _AT_ONCE // self.inputs)
        parts = (self.matrix.dequantized(slice(begin, begin + rows), x.dtype) for begin in range(0, outputs, rows))
        products = [F.linear(x, part) for part in parts]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
        return product if self.bias is None else product + self.bias

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return self.matrix.tensors

    def weight_views(self) -> dict[str, Tensor]:
        named = zip(_SUFFIXES, self.matrix.tensors, strict=True)
        views = {name: view for suffix, fused in named for name, view in self.part_views(suffix, fused).items()}
        return views if self._loaded_bias is None else views | self.part_views("bias", self._loaded_bias)

    def weight_slices(self) -> dict[str, Slice]:
        """Those of columns are in bytes of two weights, and in groups."""
        slices, columns = super().weight_slices(), self.sharding.columns
        if columns is not None:
            stored = {suffix: columns.scaled(1, size) for suffix, size in _COLUMNS_OF.items()}
            slices |= {f"{name}.{suffix}": part for name in self.output_sizes for suffix, part in stored.items()}
        return slices


class NvFp4Experts(ExpertWeights):
    """Experts of which some are dequantized at a time, for the op `experts`; of a few tokens only those they chose."""

    op = ""

    def __init__(self, context: BuildContext, tables: NvFp4Tables, prefix: str, sizes: ExpertSizes) -> None:
        OpLayer.__init__(self)  # no platform may replace the kernel, so that there is no op to be named by
        self.dtype, self.inputs, self.prefix, self.sizes = context.dtype, sizes.hidden, prefix, sizes
        self._compute = context.bind(EXPERTS, **sizes.op_sizes)
        self.gate_up = NvFp4Matrix(context, tables, sizes.experts, sizes.first_rows, inputs=sizes.hidden)
        self.down = NvFp4Matrix(context, tables, sizes.experts, sizes.hidden, inputs=sizes.local)
        self.kernel = self.compute

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        sizes, count = self.sizes, self.sizes.experts
        if ids.numel() < count:  # a copy for each choice, which may be that of an expert outside this layer
            chosen = ids.flatten().clamp(0, count - 1)
            places = torch.arange(ids.numel(), device=ids.device).view_as(ids)
            places = places.where((ids >= 0) & (ids < count), -1)
        else:
            chosen, places = torch.arange(count, device=ids.device), ids
        at_once = max(1, _AT_ONCE // (sizes.first_rows * sizes.hidden))
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for begin in range(0, len(chosen), at_once):
            part = chosen[begin : begin + at_once]
            gate_up, down = (each.dequantized(part, x.dtype) for each in (self.gate_up, self.down))
            # Places outside the part contribute nothing.
            out += self._compute(x, places - begin, weights, gate_up, down, None, None, sizes.activation)
        return out.to(x.dtype)

    def operands(self) -> tuple[Mapping[str, Any], ...]:
        return ()

    def weight_matrices(self) -> tuple[Tensor, ...]:
        return ()

    def weight_tensors(self) -> tuple[Tensor, ...]:
        return *self.gate_up.tensors, *self.down.tensors

    def weight_views(self) -> dict[str, Tensor]:
        pairs = zip(_SUFFIXES, self.gate_up.tensors, self.down.tensors, strict=True)
        return {name: view for each in pairs for name, view in self.matrix_views(*each).items()}

    def weight_slices(self) -> dict[str, Slice]:
        rows = {name: part for suffix in _SUFFIXES for name, part in self.row_slices(suffix).items()}
        columns = (self.column_slices(suffix, 1, size) for suffix, size in _COLUMNS_OF.items())
        return rows | {name: part for stored in columns for name, part in stored.items()}


class NvFp4Factory(SchemeLayers):
    """Layers in NVFP4 where the checkpoint has them; unquantized ones elsewhere."""

    def __init__(self, context: BuildContext, checkpoint: NvFp4Checkpoint) -> None:
        super().__init__(context, nvfp4_schemes(checkpoint))
        self._tables = NvFp4Tables.on(context.device)

    def other_linear(self, scheme: Scheme, local: LocalSizes, bias: bool) -> Projection:
        return NvFp4Linear(self.context, self._tables, local, bias)

    def other_experts(self, scheme: Scheme, prefix: str, sizes: ExpertSizes, bias: bool) -> ExpertWeights:
        return NvFp4Experts(self.context, self._tables, prefix, sizes)

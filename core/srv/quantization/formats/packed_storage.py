"""The conversion of packed integers to rows of blocks.

A layer's tensors are collected until all are there, and become its rows then, so that there is never a second copy of
the whole model. Must not know how words are packed (`srv.quantization.formats.packed_words`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from srv.errors import ModelError
from srv.models.checkpoints.storage import StorageFormat, TensorGroups
from srv.quantization.formats.packed_integers import SCALES, SUFFIXES, PackedForm, check_tensors, is_packed
from srv.quantization.formats.packed_words import blocks, unpack
from srv.quantization.method import DOWNLOAD_REMEDY, StoredModel
from srv.quantization.schemes import row_bytes

_BIAS = ".bias"
_ORDER = ("g_idx", "weight_g_idx")
_ZEROS = ("qzeros", "weight_zero_point")


class PackedStorageFormat(StorageFormat):
    """Tensors of packed integers, scales, zeros and orders, which become `weight` and `columns`."""

    def __init__(self, model: StoredModel, form: PackedForm) -> None:
        self._model, self._path = model, model.facts.path
        self._form = form
        self._groups = TensorGroups()
        self._biases: set[str] = set()  # those that no layer has, once `unused` has seen them

    def parts(self, name: str) -> tuple[str, ...]:
        layer, suffix = self._split(name)
        if name in self._biases:
            return (f"{name.removesuffix(_BIAS)}.weight",)  # it is read, so that it is checked
        if suffix and self._model.dequantizes(layer):
            return (f"{layer}.weight",)
        return (f"{layer}.weight", f"{layer}.columns") if suffix else (name,)

    def unused(self, names: Collection[str]) -> set[str]:
        """AutoGPTQ stores a bias with each quantized layer, also if the model has none: zeros then."""
        layers = {name.removesuffix(_BIAS): name for name in names if name.endswith(_BIAS)}
        packed = (layer for layer in layers if is_packed(self._form, self._model.types, layer))
        self._biases = {layers[layer] for layer in packed} if self._form.layout == "gptq" else set()
        return self._biases

    def shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        layers: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in stored.items():
            layer, suffix = self._split(name)
            if suffix:
                layers.setdefault(layer, {})[suffix] = shape
            else:
                shapes[name] = shape
        for layer, tensors in layers.items():
            outputs, inputs = check_tensors(self._model, self._form, layer, tensors)
            if self._model.dequantizes(layer):
                shapes[f"{layer}.weight"] = (outputs, inputs)
                continue
            shapes[f"{layer}.weight"] = (outputs, row_bytes(self._form.block_type, inputs))
            if self._form.ordered:
                shapes[f"{layer}.columns"] = (inputs,)
        return shapes

    def convert(self, name: str, stored: Tensor) -> dict[str, Tensor]:
        layer, suffix = self._split(name)
        if name in self._biases:
            if bool(stored.any()):
                self._fail("unexpected_tensors", f"it has {name}, which is not 0, and the layer has no bias")
            return {}
        if not suffix:
            return {name: stored}
        tensors = self._groups.add(layer, suffix, stored, len(self._form.suffixes))
        return {} if tensors is None else self._rows(layer, tensors)

    def _split(self, name: str) -> tuple[str, str]:
        """The layer and the suffix of a tensor of packed integers; a suffix of "" for all other tensors."""
        layer, _, suffix = name.rpartition(".")
        return (layer, suffix) if suffix in SUFFIXES[self._form.layout] else (name, "")

    def _rows(self, layer: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of blocks of a layer whose tensors are complete, and the order of its inputs."""
        form = self._form
        values, scales, zeros = self._unpacked(layer, tensors)
        if not bool(scales.any()):
            self._check_zeros(layer, values, zeros)
        loaded: dict[str, Tensor] = {}
        order = next((tensors[suffix].long() for suffix in _ORDER if suffix in tensors), None)
        if order is not None and not form.ordered:
            groups = torch.arange(values.shape[1]) // (form.group or values.shape[1])
            if not torch.equal(order, groups):
                self._fail("damaged", f"the inputs of {layer} are not in the order of their groups, as desc_act states")
        if form.ordered:
            assert order is not None
            counts = torch.bincount(order.clamp(0, scales.shape[1]), minlength=scales.shape[1])
            if int(order.min()) < 0 or counts.tolist() != [form.group] * scales.shape[1]:
                self._fail("damaged", f"the inputs of {layer} do not fill its groups of {form.group}")
            columns = order.argsort(stable=True)
            values, loaded[f"{layer}.columns"] = values[:, columns], columns
        if self._model.dequantizes(layer):
            wide = self._widened(values, scales, zeros)
            return {f"{layer}.weight": wide[:, columns.argsort()] if form.ordered else wide}
        loaded[f"{layer}.weight"] = blocks(values.contiguous(), scales, zeros, form.bits)
        return loaded

    def _widened(self, values: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Dequantized in float32; the arguments are as `_unpacked` returns them."""
        group, middle = self._form.group or values.shape[1], 2 ** (self._form.bits - 1)
        least = middle if zeros is None else zeros.float().repeat_interleave(group, 1)
        return (values.float() - least) * scales.float().repeat_interleave(group, 1)

    def _unpacked(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values uint8 [N, K], scales [N, groups], and zeros uint8 [N, groups] unless they are the middle."""
        form = self._form
        scales = self._scales(layer, next(tensors[suffix] for suffix in SCALES if suffix in tensors))
        words = tensors[form.suffixes[0]]
        stored = next((tensors[suffix] for suffix in _ZEROS if suffix in tensors), None)
        if form.layout == "rows":
            shape = tensors["weight_shape"].tolist()
            if shape != [words.shape[0], words.shape[1] * 32 // form.bits]:
                self._fail("shape_mismatch", f"{layer}.weight_shape is {shape}, which its packed weights are not")
            zeros = None if stored is None else unpack(stored, form.bits, 0)[: len(words)]  # their last word is full
            return unpack(words, form.bits, 1), scales, zeros
        assert stored is not None
        values = unpack(words, form.bits, 1 if form.layout == "awq" else 0, interleaved=form.interleaved).t()
        zeros = unpack(stored, form.bits, 1, interleaved=form.interleaved).t()[: len(values)]
        if form.symmetric:
            self._check_middle(layer, zeros)
            return values, scales.t(), None
        zeros = (zeros + form.zero_offset) & (2**form.bits - 1)
        return values, scales.t().contiguous(), zeros

    def _check_middle(self, layer: str, zeros: Tensor) -> None:
        """Zeros of GPTQ are stored less 1, or as they are, whatever the format is called; those of AWQ as they are."""
        middle = 2 ** (self._form.bits - 1)
        stored = {middle} if self._form.layout == "awq" else {middle, middle - 1}
        zero_points = set(zeros.flatten().tolist())
        if len(zero_points) > 1 or not zero_points <= stored:
            self._fail("damaged", f"{layer} has zero points other than {middle}, but its quantization is symmetric")

    def _check_zeros(self, layer: str, values: Tensor, zeros: Tensor | None) -> None:
        """A layer without any scale above 0 consists of zeros; other integers show that its scales are lost."""
        if self._form.ordered:
            return  # the zero of each integer is that of its group, whose inputs are anywhere
        middle = torch.tensor(2 ** (self._form.bits - 1), dtype=torch.uint8)
        group = self._form.group or values.shape[1]
        expected = middle if zeros is None else zeros.repeat_interleave(group, 1)
        if bool((values != expected).any()):
            self._fail("damaged", f"every scale of {layer} is 0, but its integers are not")

    def _scales(self, layer: str, stored: Tensor) -> Tensor:
        """As float16, which blocks have, or as float32 for weights that become floats.

        Those of weights with zero points come from a difference of a largest and a smallest weight. Symmetric ones may
        be negative: AutoRound chooses the sign by which the weight of the largest magnitude becomes the lowest integer.
        """
        dtype = "float32" if self._model.dequantizes(layer) else "float16"
        scales = stored.to(getattr(torch, dtype))
        if not bool(scales.isfinite().all()) or bool(((scales == 0) & (stored != 0)).any()):
            self._fail("damaged", f"a scale of {layer} is not a finite number that {dtype} can hold")
        if not self._form.symmetric and bool((scales < 0).any()):
            self._fail("damaged", f"a scale of {layer} is negative, which those of weights with zero points are not")
        return scales

    def _fail(self, code: str, reason: str) -> NoReturn:
        raise ModelError(code, self._path, reason, DOWNLOAD_REMEDY)

"""Weights in NVFP4: which tensors a layer stores, and as what it is held. Torch-free.

Owns what the checkpoints of ModelOpt and of compressed-tensors have in common; each states otherwise that it is in
NVFP4, and names its tensors otherwise. Must not know either.

    ModelOpt        compressed-tensors
    weight          weight_packed        uint8 [N, K / 2]: two E2M1 codes per byte, that of the lower column in the low
                                         four bits
    weight_scale    weight_scale         float8_e4m3fn [N, K / 16], one per group of 16 inputs
    weight_scale_2  weight_global_scale  float32, one per matrix, and its reciprocal: a weight is
                                         value(code) * weight_scale * weight_scale_2
    input_scale     input_global_scale   float32, of activations in NVFP4; not read, since activations keep the model's
                                         dtype

Layers hold NVFP4 as it is stored, in 4.5 bits per weight. No block type holds it exactly: those with groups of 16 have
integers as scales. `Fp8` with blocks of 1 x 16 would hold it in 10 bits, but the contract of `linear_fp8` has blocks of
a multiple of 32 inputs.

(Formats: the source code of ModelOpt, and of compressed-tensors)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.formats.fp8_weights import REMEDY, Fp8Form, declares
from srv.quantization.method import DOWNLOAD_REMEDY, QuantMethod, StoredModel
from srv.quantization.schemes import SCALE, HeldTensor, LayerSchemes, Matrix, Scheme, Units

GROUP = 16  # inputs that share a scale
NVFP4 = "NVFP4"
MATRIX_SCALE = "weight_scale_2"  # as layers call the scale of a matrix
PACKED_DTYPE, SCALE_DTYPE = "uint8", "float8_e4m3fn"
_NOTE = (
    "its NVFP4 weights are dequantized for every product, which takes longer than one with unquantized weights, and "
    "activations keep the model's dtype, whatever the checkpoint states of these"
)


class NvFp4Names(NamedTuple):
    """The suffixes of tensors in checkpoints. `inverse`: their scale of a matrix divides what others' multiplies."""

    weight: str
    matrix_scale: str
    input_scale: str
    inverse: bool = False


class NvFp4Checkpoint(NamedTuple):
    """`excluded`: patterns of layers that are not quantized, as the configuration states them."""

    model: StoredModel
    names: NvFp4Names
    excluded: tuple[str, ...]


@dataclass(frozen=True)
class NvFp4(Scheme):
    """NVFP4 as it is stored, but with the scale of a matrix for each of its outputs: fused layers have their own."""

    op = ""  # no platform has one

    @property
    def units(self) -> Units:
        return Units(inputs=GROUP)

    def tensors(self, matrix: Matrix) -> tuple[HeldTensor, ...]:
        outputs = sum(matrix.outputs)
        return (
            HeldTensor("weight", (outputs, matrix.inputs // 2), PACKED_DTYPE),
            HeldTensor(SCALE, (outputs, matrix.inputs // GROUP), "uint8"),
            HeldTensor(MATRIX_SCALE, (outputs,), "float32"),
        )


class NvFp4Form(NamedTuple):
    """excluded: patterns of layers that are not quantized, as the configuration states them."""

    excluded: tuple[str, ...]


def is_nvfp4(checkpoint: NvFp4Checkpoint, layer: str) -> bool:
    """Whether a layer has a weight in NVFP4. Raises ModelError for tensors that do not fit each other."""
    model, stored = checkpoint.model, checkpoint.names
    weight, *scales = (f"{layer}.{suffix}" for suffix in (stored.weight, SCALE, stored.matrix_scale))
    dtype, path = model.types.get(weight), model.facts.path

    def fail(code: str, reason: str) -> NoReturn:
        raise ModelError(code, path, reason, DOWNLOAD_REMEDY)

    if dtype in FLOATS or not any(name in model.types for name in (weight, *scales)):
        return False  # if it is missing, the loader says so
    if dtype is not None and dtype != PACKED_DTYPE:
        reason = f"{weight} is stored as {dtype}, not as {PACKED_DTYPE}, which {NVFP4} is"
        raise ModelError("unsupported_quantization", path, reason, REMEDY)
    for name in (weight, *scales):
        if name not in model.types:
            fail("missing_tensors", f"it lacks {name}")
    for name, expected in zip(scales, (SCALE_DTYPE, "float32"), strict=True):
        if model.types[name] != expected:
            fail("dtype_mismatch", f"{name} is stored as {model.types[name]}, not as {expected}")
    shape, (groups, whole) = model.shapes[weight], (model.shapes[name] for name in scales)
    if len(shape) != 2 or shape[1] * 2 % GROUP:
        fail("shape_mismatch", f"{weight} has the shape {list(shape)}, not [outputs, bytes of groups of {GROUP}]")
    if groups != (wanted := (shape[0], shape[1] * 2 // GROUP)):
        reason = f"{scales[0]} has the shape {list(groups)}, but its weights {list(shape)} need {list(wanted)}"
        fail("shape_mismatch", reason)
    if math.prod(whole) != 1:
        fail("shape_mismatch", f"{scales[1]} has the shape {list(whole)}, and is not one value")
    return True


def nvfp4_schemes(checkpoint: NvFp4Checkpoint) -> LayerSchemes:
    """Raises ModelError as `is_nvfp4`, and for layers of which only some are quantized."""
    model, held = checkpoint.model, NvFp4()
    path, stated = model.facts.path, Fp8Form(excluded=checkpoint.excluded, head=True)

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> NvFp4 | None:
        found = {each: is_nvfp4(checkpoint, each) if model.types else declares(stated, each) for each in names}
        if not any(found.values()):
            return None
        if embedding:
            reason = f"{names[0]} is in {NVFP4}, and no embedding layer supports that"
        elif not all(found.values()):
            quantized, plain = (next(name for name, each in found.items() if each is kind) for kind in (True, False))
            reason = f"of layers that share one input, {quantized} is in {NVFP4} and {plain} is not"
        elif inputs % GROUP:
            reason = f"the {inputs} inputs of {names[0]} are not groups of {GROUP}"
        else:
            return held
        raise ModelError("unsupported_quantization", path, reason, REMEDY)

    return scheme


def _experts(bias: bool) -> tuple[str, str] | None:
    return (f"experts with biases cannot be in {NVFP4}", REMEDY) if bias else None


def nvfp4_method(name: str, checkpoint: Callable[[StoredModel], NvFp4Checkpoint], module: str) -> QuantMethod:
    """The facts of a method for checkpoints that are in NVFP4. `module`: with its layers and its storage format."""
    return QuantMethod(
        name=name,
        layers=f"{module}:NvFp4Layers",
        storage=f"{module}:NvFp4StorageFormat",
        sharding=None,
        schemes=lambda model: nvfp4_schemes(checkpoint(model)),
        experts=_experts,
        row_tensors=("weight", SCALE, MATRIX_SCALE),
        packed=True,
        dequantizable=True,
        note=_NOTE,
    )

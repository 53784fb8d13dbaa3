"""What the headers of a checkpoint with packed integers show of its layers, before weights are read. Torch-free.

Owns the shapes and dtypes of the tensors of a quantized layer. Must not know configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.method import DOWNLOAD_REMEDY, StoredModel

if TYPE_CHECKING:
    from srv.quantization.packed import PackedForm

Layout: TypeAlias = Literal["awq", "gptq", "rows"]
BLOCK = 32  # weights in one of the blocks that layers hold
SCALES = ("scales", "weight_scale")
_INDICES = ("g_idx", "weight_g_idx", "weight_shape")  # integers that are not packed


def check_tensors(
    model: StoredModel, scheme: PackedForm, layer: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int]:
    """The sizes of a quantized layer, by the shapes of its tensors, which their suffixes name.

    Raises ModelError if tensors are missing, left over, or have other shapes or dtypes; and unsupported_quantization
    for rows that cannot be blocks.
    """

    def fail(code: str, reason: str) -> NoReturn:
        raise ModelError(code, model.facts.path, reason, DOWNLOAD_REMEDY)

    if missing := [suffix for suffix in scheme.suffixes if suffix not in shapes]:
        fail("missing_tensors", f"it lacks {layer}.{missing[0]}")
    if extra := [suffix for suffix in shapes if suffix not in scheme.suffixes]:
        fail("unexpected_tensors", f"it has {layer}.{extra[0]}, which its quantization_config does not state")
    for suffix in shapes:
        wanted = FLOATS if suffix in SCALES else ("int32", "int64") if suffix in _INDICES else ("int32",)
        if (dtype := model.types.get(f"{layer}.{suffix}", wanted[0])) not in wanted:
            fail("dtype_mismatch", f"{layer}.{suffix} is stored as {dtype}, not as {' or '.join(wanted)}")
    first = shapes[scheme.suffixes[0]]
    if len(first) != 2:
        fail("shape_mismatch", f"{layer}.{scheme.suffixes[0]} has the shape {list(first)}, not two axes")
    outputs, inputs = unpacked_shape(scheme.layout, first, 32 // scheme.bits)
    if (unfit := unfit_inputs(scheme, inputs, layer)) is not None:
        fail("unsupported_quantization", unfit)
    expected = _tensor_shapes(scheme, outputs, inputs)
    for suffix, shape in shapes.items():
        if shape != expected.get(suffix, shape):
            reason = f"{layer}.{suffix} has the shape {list(shape)}, but {list(expected[suffix])} fits its weights"
            fail("shape_mismatch", f"{reason} and groups of {scheme.group or inputs} inputs")
    return outputs, inputs


def _tensor_shapes(scheme: PackedForm, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors beside the packed integers."""
    groups = -(-inputs // scheme.group) if scheme.group else 1
    words = -(-outputs // (32 // scheme.bits))
    return {
        "scales": (groups, outputs),
        "qzeros": (groups, words),
        "g_idx": (inputs,),
        "weight_scale": (outputs, groups),
        "weight_zero_point": (words, groups),
        "weight_g_idx": (inputs,),
        "weight_shape": (2,),
    }


def unfit_inputs(scheme: PackedForm, inputs: int, layer: str) -> str | None:
    """The clause that says why rows of a layer cannot be blocks; None if they can."""
    if inputs % BLOCK or (scheme.group and inputs % scheme.group):
        return f"the {inputs} inputs of {layer} are not whole groups and blocks"
    return None


def unpacked_shape(layout: Layout, packed: tuple[int, ...], per_word: int) -> tuple[int, int]:
    """(outputs, inputs) of a layer from the shape of its packed integers."""
    rows, columns = packed
    match layout:
        case "awq":
            return columns * per_word, rows
        case "gptq":
            return columns, rows * per_word
        case "rows":
            return rows, columns * per_word

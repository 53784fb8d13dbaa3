"""What the headers of a checkpoint show of its int8 layers, before weights are read. Torch-free.

Owns the comparison of a layer's stored tensors with those that its kind of layer has. Must not know configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.checkpoints.text_names import needed_tensors
from srv.quantization.method import DOWNLOAD_REMEDY, UP_PROJECTION, StoredModel

if TYPE_CHECKING:
    from srv.specs import ModelFacts

INT8 = "int8"
_EXPERTS_NOTE = (
    "the inputs of its int8 experts are quantized to int8 as well, with a scale per row, by kernels that multiply int8 "
    "only (of NPUs, and torch_native); those of CPUs and Triton's do not"
)
EXPERTS_REMEDY = "Use the checkpoint in full precision, or a GGUF file"
# The suffixes of tensors that only quantized layers have, of any method of int8.
_QUANTIZED = (
    *("weight_scale", "weight_offset", "weight_zero_point"),
    *("input_scale", "input_offset", "input_zero_point", "quant_bias", "deq_scale"),
)


def experts_note(model: ModelFacts) -> str:
    """What a checkpoint whose activations are not quantized has to say of its experts; "" if they are not int8."""
    int8 = (name for name, each in needed_tensors(model).items() if each.dtype == INT8 and ".experts." in name)
    return _EXPERTS_NOTE if any(int8) else ""


def check_experts(model: StoredModel, names: Sequence[str]) -> None:
    """Raises ModelError (unsupported_quantization) for int8 projections of experts that have biases, if any does."""
    experts = f"{names[0].partition('.experts.')[0]}.experts"
    biases = (f"{names[0]}.bias", f"{experts}.gate_up_proj_bias", f"{experts}.down_proj_bias")
    if found := next((each for each in biases if each in model.types), None):
        reason = f"the experts {experts} are int8 and have biases ({found}), which experts of int8 cannot have"
        raise ModelError("unsupported_quantization", model.facts.path, reason, EXPERTS_REMEDY)


class Beside(NamedTuple):
    """A tensor beside an int8 weight: the dtypes that it may have, and the axes of its shapes.

    Of an axis, "out" stands for the outputs of the weight.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[str | int, ...], ...]


def check_int8(
    model: StoredModel, layer: str, inputs: int, tensors: Mapping[str, Beside], ignored: tuple[str, ...] = ()
) -> None:
    """Check the headers of a layer with int8 weights. `tensors`, `ignored`: by suffix, those that it must and may have.

    Raises ModelError: missing_tensors, unexpected_tensors, dtype_mismatch, shape_mismatch, and unsupported_quantization
    for an expert with a bias.
    """
    weight = f"{layer}.weight"
    if ".experts." in layer and f"{layer}.bias" in model.types:
        reason = f"{layer} is int8 and has a bias, which experts of int8 cannot have"
        raise ModelError("unsupported_quantization", model.facts.path, reason, EXPERTS_REMEDY)
    for suffix in ("weight", *tensors):
        if f"{layer}.{suffix}" not in model.types:
            _fail(model, "missing_tensors", f"it lacks {layer}.{suffix}")
    _check_dtype(model, weight, (INT8,))
    extra = [each for each in _stored(model, layer) if each not in tensors and each not in ignored]
    if extra:
        reason = f"it has {layer}.{extra[0]}, which layers of its kind of int8 do not have"
        _fail(model, "unexpected_tensors", reason)
    shape = model.shapes[weight]
    if len(shape) != 2 or shape[1] != inputs:
        _fail(model, "shape_mismatch", f"{weight} has the shape {list(shape)}, not a row of {inputs} per output")
    for suffix, beside in tensors.items():
        name = f"{layer}.{suffix}"
        _check_dtype(model, name, beside.dtypes)
        expected = [[shape[0] if size == "out" else size for size in axes] for axes in beside.shapes]
        if list(found := model.shapes[name]) not in expected:
            fits = " or ".join(map(str, expected))
            reason = f"{name} has the shape {list(found)}, but its weights {list(shape)} need {fits}"
            _fail(model, "shape_mismatch", reason)


def check_unquantized(model: StoredModel, layer: str) -> None:
    """Check that a layer without int8 weights has none of the tensors of one with them; if it is missing, loaders say.

    Raises ModelError like `check_int8`.
    """
    weight, stored = f"{layer}.weight", _stored(model, layer)
    if weight in model.types:
        _check_dtype(model, weight, (INT8,) if stored and model.types[weight] not in FLOATS else FLOATS)
        if stored:
            reason = f"it has {layer}.{stored[0]}, but {weight} is stored as {model.types[weight]}"
            _fail(model, "unexpected_tensors", reason)
    elif stored:
        _fail(model, "missing_tensors", f"it lacks {weight}, to which {layer}.{stored[0]} belongs")


def check_up_projections(model: StoredModel) -> None:
    """Check, likewise, the up-projections of latent attention, which are no linear layers here."""
    for name in model.types:
        layer = name.removesuffix(".weight")
        if layer.endswith(UP_PROJECTION):
            check_unquantized(model, layer)


def _stored(model: StoredModel, layer: str) -> list[str]:
    return [suffix for suffix in _QUANTIZED if f"{layer}.{suffix}" in model.types]


def _check_dtype(model: StoredModel, name: str, allowed: tuple[str, ...]) -> None:
    if (dtype := model.types[name]) not in allowed:
        _fail(model, "dtype_mismatch", f"{name} is stored as {dtype}, not as {' or '.join(allowed)}")


def _fail(model: StoredModel, code: str, reason: str) -> NoReturn:
    raise ModelError(code, model.facts.path, reason, DOWNLOAD_REMEDY)

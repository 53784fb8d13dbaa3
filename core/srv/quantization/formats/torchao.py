"""Checkpoints of torchao: which layers are quantized, in which form, and their sizes. Torch-free.

Owns what headers must show; `srv.quantization.formats.torchao_configs` reads configurations. torchao stores each
quantized weight as several tensors (safetensors, since its version 0.16); older checkpoints are pickles, which are
refused when files are read. Of the experts of a layer it quantizes the linear layers of each, or the parameters of all,
if a configuration names them (`srv.models.checkpoints.expert_tensors`). Must not know layers.

    weights     _weight_qdata                 _weight_scale              _weight_zero_point
    int8        int8 [N, K]                   a float per row, [N, 1]    integers [N, 1]; all of them must be 0
    4 bits      two in a byte, [N, K / 2]     a float, [K / g, N]        a float, [K / g, N]
    FP8         float8_e4m3fn [N, K]          a float per block          -

    w = scale * q + zero    4 bits, of two's complement; the low half of a byte is the first of two neighbours

4-bit weights become Q4_1 blocks of GGUF files at load (docs/adr/0070-packed-integers.md), and FP8 weights those of the
layers of other FP8 checkpoints (docs/adr/0071-fp8-weights.md).
(Format: the source code of torchao, `Int8Tensor`, `Int4Tensor` and `Float8Tensor`, and of transformers)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.formats.fp8 import NOTE, are_fp8
from srv.quantization.formats.int8_checks import check_experts, experts_note
from srv.quantization.formats.torchao_configs import DATA, SCALE, Form, Weights, declares, read_form
from srv.quantization.method import DOWNLOAD_REMEDY, QuantMethod, StoredModel
from srv.quantization.schemes import Int8, LayerSchemes, Scheme

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "torchao"
ZERO = "_weight_zero_point"
REMEDY = "Use the checkpoint in full precision; --torchao-config quantizes it at load"
_FACTOR = "_weight_act_pre_scale"  # what inputs are multiplied by
_STORED_AS: Mapping[Weights, tuple[str, ...]] = {"int8": ("int8",), "int4": ("uint8", "int8")}


def form_of(model: StoredModel) -> Form:
    """Raises ModelError if the configuration is not supported."""
    try:
        return read_form(model.facts.config.get("quantization_config") or {})
    except ValueError as error:
        raise ModelError("unsupported_quantization", model.facts.path, str(error), REMEDY) from error


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or str(stated.get("quant_method", "")).lower() != NAME:
        return False
    try:
        return bool(read_form(stated))
    except ValueError as error:
        return str(error)


def are_quantized(model: StoredModel, form: Form, names: Sequence[str], inputs: int) -> bool:
    """Whether layers that share one input are quantized: those that a linear layer fuses, or projections of experts.

    Their tensors say so; without weights, the configuration does. Raises ModelError: unsupported_quantization for
    weights that layers cannot hold; missing_tensors, dtype_mismatch and shape_mismatch for damaged ones.
    """
    _refuse_further_tensors(model, names)
    if not model.types and any(".experts." in name for name in names):
        return False  # torchao leaves experts as they are unless its configuration names them
    if form.weights == "fp8":
        return are_fp8(model, form.fp8, names)
    kept = {name: _is_quantized(model, form, name) for name in names}
    if not any(kept.values()):
        return False
    if not all(kept.values()):
        quantized, plain = (next(name for name, each in kept.items() if each is kind) for kind in (True, False))
        _refuse(model, f"of layers that share one input, {quantized} is quantized and {plain} is not")
    if form.weights == "int8" and ".experts." in names[0]:
        check_experts(model, names)
    if form.weights == "int4" and inputs % form.group:
        _refuse(model, f"the {inputs} inputs of {names[0]} are not whole groups of {form.group}")
    return True


def _refuse(model: StoredModel, reason: str) -> NoReturn:
    raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)


def _refuse_further_tensors(model: StoredModel, names: Sequence[str]) -> None:
    """Refuse factors of inputs, which layers do not multiply by."""
    factors = [each for name in names if (each := f"{name}.{_FACTOR}") in model.types]
    if factors:
        shown = model.stored_names.get(factors[0], factors[0])
        _refuse(model, f"inputs are multiplied by {shown}, which no layer does")


def check_embedding(model: StoredModel, name: str) -> None:
    """Raises ModelError (unsupported_quantization) for an embedding with quantized weights."""
    if f"{name}.{DATA}" in model.types:
        _refuse(model, f"{name}.{DATA} holds quantized weights, and no embedding layer of torchao's formats does")


def _is_quantized(model: StoredModel, form: Form, name: str) -> bool:
    """The tensors of a layer say so; without weights, the configuration does."""
    if model.types:
        stored = [suffix for suffix in (DATA, SCALE, ZERO) if f"{name}.{suffix}" in model.types]
        if stored:
            _check(model, form, name, stored)
        return bool(stored)
    return declares(model.facts.config.get("quantization_config") or {}, name)


def _check(model: StoredModel, form: Form, name: str, stored: Sequence[str]) -> None:
    """Raises ModelError unless the headers of the tensors of a layer fit each other. Zeros of int8 may be left out."""
    path = model.facts.path
    missing = [each for each in (DATA, SCALE, *((ZERO,) if form.weights == "int4" else ())) if each not in stored]
    if missing:
        raise ModelError("missing_tensors", path, f"it lacks {name}.{missing[0]}", DOWNLOAD_REMEDY)
    integers = _STORED_AS[form.weights]
    allowed = {DATA: integers, SCALE: FLOATS, ZERO: FLOATS if form.weights == "int4" else ("int8", "int32", "int64")}
    for suffix in stored:
        dtype = model.types[f"{name}.{suffix}"]
        if dtype not in allowed[suffix]:
            reason = f"{name}.{suffix} is stored as {dtype}, not as {' or '.join(allowed[suffix])}"
            raise ModelError("dtype_mismatch", path, reason, DOWNLOAD_REMEDY)
    shape = model.shapes[f"{name}.{DATA}"]
    if len(shape) != 2 or (form.weights == "int4" and shape[1] * 2 % form.group):
        groups = f" of whole groups of {form.group} inputs" if form.group else ""
        reason = f"{name}.{DATA} has the shape {list(shape)}, which is no matrix{groups}"
        raise ModelError("shape_mismatch", path, reason, DOWNLOAD_REMEDY)
    expected = (shape[1] * 2 // form.group, shape[0]) if form.weights == "int4" else (shape[0], 1)
    for suffix in stored:
        found = model.shapes[f"{name}.{suffix}"]
        if suffix != DATA and found != expected:
            reason = f"{name}.{suffix} has the shape {list(found)}, but its weights {list(shape)} need {list(expected)}"
            raise ModelError("shape_mismatch", path, reason, DOWNLOAD_REMEDY)


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `are_quantized`, and for a configuration that is not supported."""
    form = form_of(model)
    held = form.held

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Scheme | None:
        if embedding:
            check_embedding(model, names[0])
        return None if embedding or not are_quantized(model, form, names, inputs) else held

    return scheme


def _of_form(model: ModelFacts) -> QuantMethod:
    try:
        form = read_form(model.config.get("quantization_config") or {})
    except ValueError:  # the checkpoint is refused
        return METHOD
    return METHOD._replace(ops=(form.held.op,), note=_note(model, form), fp8_inputs=form.fp8.inputs)


def _note(model: ModelFacts, form: Form) -> str:
    if form.weights == "fp8":
        return NOTE
    return experts_note(model) if form.held == Int8("none") else ""


METHOD = QuantMethod(
    name=NAME,
    storage="srv.quantization.formats.torchao_storage:TorchAOStorageFormat",
    ops=("linear_int8", "linear_w8a8", "linear_gguf", "linear_fp8"),
    detect=detect,
    sharding="weights of torchao cannot be sharded yet",
    schemes=schemes,
    row_tensors=("weight", "weight_scale"),
    packed=True,
    fused_experts=True,
    of_form=_of_form,
)

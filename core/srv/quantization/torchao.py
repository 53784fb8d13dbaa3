"""Checkpoints of torchao: which layers are quantized, in which form, and their sizes. Torch-free.

Owns the configurations, and what headers must show. torchao stores each quantized weight as several tensors
(safetensors, since its version 0.16); older checkpoints are pickles, which are refused when files are read. Must not
know layers.

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
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.formats.gguf_types import TYPES_BY_NAME
from srv.models.formats.text_names import needed_tensors
from srv.quantization.fp8 import NOTE, are_fp8, held_scale, of_scheme
from srv.quantization.fp8_configs import Fp8Scheme
from srv.quantization.layer_patterns import names_layer, stated_names
from srv.quantization.method import DOWNLOAD_REMEDY, LayerOps, QuantMethod, StoredModel, TensorBytes
from srv.quantization.tensor_bytes import of_blocks, of_rows

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "torchao"
DATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
BLOCK_TYPE = "Q4_1"  # as which layers hold weights of 4 bits
REMEDY = "Use the checkpoint in full precision; --torchao-config quantizes it at load"
Weights: TypeAlias = Literal["int8", "int4", "fp8"]
# The weights of each configuration and the op of its layers, by its class or, in older files, its name.
_KINDS: Mapping[str, tuple[Weights, str]] = {
    "Int8WeightOnlyConfig": ("int8", "linear_int8"),
    "int8_weight_only": ("int8", "linear_int8"),
    "Int8DynamicActivationInt8WeightConfig": ("int8", "linear_w8a8"),
    "int8_dynamic_activation_int8_weight": ("int8", "linear_w8a8"),
    "Int4WeightOnlyConfig": ("int4", "linear_gguf"),
    "int4_weight_only": ("int4", "linear_gguf"),
    "Float8WeightOnlyConfig": ("fp8", "linear_fp8"),
    "float8_weight_only": ("fp8", "linear_fp8"),
    "Float8DynamicActivationFloat8WeightConfig": ("fp8", "linear_fp8"),
    "float8_dynamic_activation_float8_weight": ("fp8", "linear_fp8"),
}
_GROUP = 128  # of Int4WeightOnlyConfig, if it states none
BLOCK, BLOCK_BYTES = TYPES_BY_NAME[BLOCK_TYPE].elements, TYPES_BY_NAME[BLOCK_TYPE].size
_FACTOR = "_weight_act_pre_scale"  # what inputs are multiplied by
_STORED_AS: Mapping[Weights, tuple[str, ...]] = {"int8": ("int8",), "int4": ("uint8", "int8")}
_SCALE_BYTES = 4
_FP8_INPUTS = ("Float8DynamicActivationFloat8WeightConfig", "float8_dynamic_activation_float8_weight")


class Form(NamedTuple):
    """How the quantized weights of a checkpoint are stored.

    op: by which layers compute. group: inputs that share a scale, of 4-bit weights. fp8: how FP8 weights are scaled.
    """

    weights: Weights
    op: str
    group: int = 0
    fp8: Fp8Scheme = Fp8Scheme()


def _read(stated: Mapping[str, Any]) -> Form:
    """The form of the quantized layers. Raises ValueError with a clause for configurations that they do not support."""
    found = stated.get("quant_type")
    if isinstance(found, Mapping):
        if others := sorted(found.keys() - {"default"}):
            raise ValueError(f"its layers are quantized differently (quant_type has {others[0]!r})")
        found = found.get("default")
        kind, fields = (found.get("_type"), found.get("_data")) if isinstance(found, Mapping) else (found, {})
    else:
        kind, fields = found, stated.get("quant_type_kwargs")
    if str(kind) not in _KINDS:
        names = " or ".join(name for name in _KINDS if name[0].isupper())
        raise ValueError(f"its weights are of {kind}, not of {names}")
    weights, op = _KINDS[str(kind)]
    excluded = _excluded(stated)
    fields = fields if isinstance(fields, Mapping) else {}
    try:
        match weights:
            case "int8":
                return _int8(op, fields)
            case "int4":
                return _int4(op, fields)
            case "fp8":
                return Form(weights, op, fp8=_fp8(fields, excluded)._replace(inputs=str(kind) in _FP8_INPUTS))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"its quant_type has an invalid value ({type(error).__name__}: {error})") from error


def _int8(op: str, fields: Mapping[str, Any]) -> Form:
    size, granularity = fields.get("group_size"), _name(fields.get("granularity"))
    if size not in (None, -1):
        raise ValueError(f"its int8 weights have a scale per {size} inputs, not per row")
    if granularity not in ("", "PerRow"):
        raise ValueError(f"its int8 weights have scales of {granularity}, not PerRow")
    return Form("int8", op)


def _int4(op: str, fields: Mapping[str, Any]) -> Form:
    packing = _name(fields.get("int4_packing_format")).lower()
    if packing not in ("", "plain"):
        raise ValueError(f"its 4-bit weights are packed for kernels ({packing}), not plain")
    group = _count(fields.get("group_size") or _GROUP)
    if group < 1 or group % BLOCK:
        raise ValueError(f"its groups have {group} inputs, not a multiple of {BLOCK}")
    return Form("int4", op, group)


def _fp8(fields: Mapping[str, Any], excluded: tuple[str, ...]) -> Fp8Scheme:
    dtype, packing = _name(fields.get("weight_dtype")), _name(fields.get("packing_format")).lower()
    if dtype not in ("", "float8_e4m3fn"):
        raise ValueError(f"its weights are of {dtype}, not float8_e4m3fn")
    if packing not in ("", "plain"):
        raise ValueError(f"its FP8 weights are packed for kernels ({packing}), not plain")
    stated = fields.get("granularity")
    weights = stated[-1] if isinstance(stated, Sequence) and not isinstance(stated, str) else stated  # after inputs
    sizes: Mapping[str, Any] = weights.get("_data") or {} if isinstance(weights, Mapping) else {}
    match _name(weights):
        case "" | "PerRow" | "PerTensor":
            block = None
        case "PerGroup":
            block = (1, _count(sizes.get("group_size")))
        case "PerBlock":
            found = sizes.get("block_size")
            if not isinstance(found, list) or len(found) != 2:
                raise ValueError(f"its quant_type has the block {found!r}, which is no pair of sizes")
            block = (_count(found[0]), _count(found[1]))
        case other:
            raise ValueError(f"its FP8 weights have scales of {other}, not PerRow, PerTensor, PerGroup or PerBlock")
    if block is not None and (min(block) < 1 or block[1] % BLOCK):
        raise ValueError(f"its blocks are {block[0]} x {block[1]}, and their inputs are not a multiple of {BLOCK}")
    return Fp8Scheme(block, excluded, weight=DATA, scales=(SCALE,))


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"its quant_type has the size {value!r}, which is no number")
    return value


def _name(value: Any) -> str:
    """What a field names: an object of torchao, its class; a dtype or a choice, its own name; "" for none."""
    if not isinstance(value, Mapping):
        return "" if value is None else str(value)
    data = value.get("_data")
    return data if isinstance(data, str) else str(value.get("_type"))


def _excluded(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers that a configuration without weights leaves unquantized. Raises ValueError with a clause."""
    try:
        return (*stated_names(stated, "modules_to_not_convert"), "lm_head")
    except ValueError as error:
        raise ValueError(f"its {error}") from error


def form_of(model: StoredModel) -> Form:
    """Raises ModelError if the configuration is not supported."""
    try:
        return _read(model.facts.config.get("quantization_config") or {})
    except ValueError as error:
        raise ModelError("unsupported_quantization", model.facts.path, str(error), REMEDY) from error


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or str(stated.get("quant_method", "")).lower() != NAME:
        return False
    try:
        return bool(_read(stated))
    except ValueError as error:
        return str(error)


def are_quantized(model: StoredModel, form: Form, names: Sequence[str], inputs: int) -> bool:
    """Whether layers that share one input are quantized: those that a linear layer fuses, or projections of experts.

    Their tensors say so; without weights, the configuration does. Raises ModelError: unsupported_quantization for
    weights that layers cannot hold; missing_tensors, dtype_mismatch and shape_mismatch for damaged ones.
    """
    _refuse_further_tensors(model, names)
    if form.weights == "fp8":
        return are_fp8(model, form.fp8, names)
    kept = {name: _is_quantized(model, form, name) for name in names}
    if not any(kept.values()):
        return False
    if not all(kept.values()):
        quantized, plain = (next(name for name, each in kept.items() if each is kind) for kind in (True, False))
        _refuse(model, f"of layers that share one input, {quantized} is quantized and {plain} is not")
    if form.weights == "int8" and ".experts." in names[0]:
        _refuse(model, f"the experts {_experts(names[0])} are int8, which its layers do not hold")
    if form.weights == "int4" and inputs % form.group:
        _refuse(model, f"the {inputs} inputs of {names[0]} are not whole groups of {form.group}")
    return True


def _experts(name: str) -> str:
    return f"{name.partition('.experts.')[0]}.experts"


def _refuse(model: StoredModel, reason: str) -> NoReturn:
    raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)


def _refuse_further_tensors(model: StoredModel, names: Sequence[str]) -> None:
    """Refuse factors of inputs, which layers do not multiply by, and the weights of all experts in one tensor."""
    factors = [each for name in names if (each := f"{name}.{_FACTOR}") in model.types]
    if factors:
        _refuse(model, f"inputs are multiplied by {factors[0]}, which no layer does")
    if ".experts." in names[0]:
        fused = [f"{_experts(names[0])}._{part}_qdata" for part in ("gate_up_proj", "down_proj")]
        if stored := [each for each in fused if each in model.types]:
            _refuse(model, f"the quantized weights of all experts are in one tensor, {stored[0]}")


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
    excluded = _excluded(model.facts.config.get("quantization_config") or {})
    return ".experts." not in name and not any(names_layer(each, name) for each in excluded)


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


def weight_bytes(model: ModelFacts, item_size: int, projection_params: int) -> int:
    """Quantized weights with the scales that layers hold, and `item_size` for all other weights.

    A checkpoint in a form that layers do not support, which is refused, counts as it is stored.
    """
    try:
        form = _read(model.config.get("quantization_config") or {})
    except ValueError:
        return model.weight_bytes
    tensors = needed_tensors(model)
    if not tensors:
        held = _row_bytes(projection_params) if form.weights == "int4" else projection_params
        return held + (model.counted_parameters() - projection_params) * item_size
    shapes = [each.shape for name, each in tensors.items() if name.endswith(f".{DATA}") and len(each.shape) == 2]
    match form.weights:
        case "int8":
            held = sum(outputs * (inputs + _SCALE_BYTES) for outputs, inputs in shapes)
        case "fp8":
            held = sum(prod(shape) + prod(held_scale(form.fp8, *shape)) * _SCALE_BYTES for shape in shapes)
        case "int4":
            shapes = [(outputs, stored * 2) for outputs, stored in shapes]
            held = sum(outputs * _row_bytes(inputs) for outputs, inputs in shapes)
    return held + (model.counted_parameters() - sum(map(prod, shapes))) * item_size


def _row_bytes(inputs: int) -> int:
    return inputs // BLOCK * BLOCK_BYTES


def layer_ops(model: StoredModel) -> LayerOps:
    form = form_of(model)

    def op(names: tuple[str, ...], inputs: int, rows: bool) -> str:
        if rows:
            check_embedding(model, names[0])
        return form.op if not rows and are_quantized(model, form, names, inputs) else ""

    return op


def tensor_bytes(model: StoredModel) -> TensorBytes:
    form = form_of(model)
    match form.weights:
        case "fp8":
            return partial(of_scheme, form.fp8)
        case "int4":
            return partial(of_blocks, BLOCK_TYPE)
    return of_rows


def _of_form(model: ModelFacts) -> QuantMethod:
    try:
        form = _read(model.config.get("quantization_config") or {})
    except ValueError:  # the checkpoint is refused
        return METHOD
    return METHOD._replace(ops=(form.op,), note=NOTE if form.weights == "fp8" else "", fp8_inputs=form.fp8.inputs)


METHOD = QuantMethod(
    name=NAME,
    layers="srv.quantization.torchao_layers:TorchAOLayerFactory",
    storage="srv.quantization.torchao_layers:TorchAOStorageFormat",
    ops=("linear_int8", "linear_w8a8", "linear_gguf", "linear_fp8"),
    detect=detect,
    weight_bytes=weight_bytes,
    sharding="weights of torchao cannot be sharded yet",
    layer_ops=layer_ops,
    tensor_bytes=tensor_bytes,
    row_tensors=("weight", "weight_scale"),
    packed=True,
    of_form=_of_form,
)

"""Checkpoints of torchao: which layers are quantized, in which form, and their sizes. Torch-free.

Owns configurations, and what headers must show. One configuration is for all linear layers, or there is one for each
name or pattern (`FqnToConfig`): all of these must be alike, since which layers are quantized follows from the stored
tensors. torchao stores each
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
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.quantization.formats.fp8_weights import DTYPE, NOTE, Fp8Form, are_fp8, with_block
from srv.quantization.formats.int8_weights import check_experts, experts_note
from srv.quantization.formats.layer_patterns import REGEX, check_pattern, names_layer, stated_names
from srv.quantization.formats.stored_counts import ceil, linear_layers, or_unknown_storage
from srv.quantization.method import (
    DOWNLOAD_REMEDY,
    QuantMethod,
    StoredCounts,
    StoredMatrix,
    StoredModel,
    UnknownStorage,
    shape_of_bytes,
)
from srv.quantization.schemes import Blocks, Inputs, Int8, LayerSchemes, Scheme

if TYPE_CHECKING:
    from srv.specs import ModelFacts

DATA, SCALE = "_weight_qdata", "_weight_scale"
BLOCK_TYPE = "Q4_1"  # as which layers hold weights of 4 bits
BLOCK = TYPES_BY_NAME[BLOCK_TYPE].elements
Weights: TypeAlias = Literal["int8", "int4", "fp8"]
# The weights of each configuration and how it quantizes inputs, by its class or, in older files, its name.
_KINDS: Mapping[str, tuple[Weights, Inputs]] = {
    "Int8WeightOnlyConfig": ("int8", "none"),
    "int8_weight_only": ("int8", "none"),
    "Int8DynamicActivationInt8WeightConfig": ("int8", "dynamic"),
    "int8_dynamic_activation_int8_weight": ("int8", "dynamic"),
    "Int4WeightOnlyConfig": ("int4", "none"),
    "int4_weight_only": ("int4", "none"),
    "Float8WeightOnlyConfig": ("fp8", "none"),
    "float8_weight_only": ("fp8", "none"),
    "Float8DynamicActivationFloat8WeightConfig": ("fp8", "dynamic"),
    "float8_dynamic_activation_float8_weight": ("fp8", "dynamic"),
}
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")  # a configuration for each layer or parameter
_FIELDS = ("fqn_to_config", "module_fqn_to_config")
_GROUP = 128  # of Int4WeightOnlyConfig, if it states none
NAME = "torchao"
ZERO = "_weight_zero_point"
REMEDY = "Use the checkpoint in full precision; --torchao-config quantizes it at load"
_FACTOR = "_weight_act_pre_scale"  # what inputs are multiplied by
_STORED_AS: Mapping[Weights, tuple[str, ...]] = {"int8": ("int8",), "int4": ("uint8", "int8")}


class Form(NamedTuple):
    """How the quantized weights of a checkpoint are stored.

    inputs: how those of int8 layers are quantized. group: inputs that share a scale, of 4-bit weights. fp8: how FP8
    weights are scaled.
    """

    weights: Weights
    inputs: Inputs = "none"
    group: int = 0
    fp8: Fp8Form = Fp8Form()

    @property
    def held(self) -> Scheme:
        """What layers hold the weights as."""
        match self.weights:
            case "int8":
                return Int8(self.inputs)
            case "int4":
                return Blocks((BLOCK_TYPE,))
            case "fp8":
                return self.fp8.held


def read_form(quant_config: Mapping[str, Any]) -> Form:
    """The form of the quantized layers. Raises ValueError with a clause for configurations that they do not support."""
    quant_type = quant_config.get("quant_type")
    if not isinstance(quant_type, Mapping):
        return _form(quant_config, quant_type, quant_config.get("quant_type_kwargs"))
    if others := sorted(quant_type.keys() - {"default"}):
        raise ValueError(f"its layers are quantized differently (quant_type has {others[0]!r})")
    forms: dict[Form, str] = {}
    for name, layer_type in _by_layer(quant_type.get("default")).items():
        kind, fields = (
            (layer_type.get("_type"), layer_type.get("_data")) if isinstance(layer_type, Mapping) else (layer_type, {})
        )
        forms.setdefault(_form(quant_config, kind, fields), name)
    if len(forms) != 1:
        differ = " and ".join(map(repr, list(forms.values())[:2]))
        raise ValueError(f"its layers are quantized differently ({differ})" if forms else "it quantizes no layer")
    return next(iter(forms))


def _by_layer(quant_config: Any) -> Mapping[str, Any]:
    """The configurations of layers by their names or patterns, without those that stay as they are."""
    return {name: field for name, field in _stated_by_layer(quant_config).items() if field is not None}


def _stated_by_layer(quant_config: Any) -> Mapping[str, Any]:
    if not isinstance(quant_config, Mapping) or str(quant_config.get("_type")) not in _BY_NAME:
        return {"_default": quant_config}
    fields = quant_config.get("_data")
    by_layer = (
        next((fields[field] for field in _FIELDS if fields.get(field)), None) if isinstance(fields, Mapping) else None
    )
    if not isinstance(by_layer, Mapping):
        raise ValueError(f"its {quant_config['_type']} has no {_FIELDS[0]}")
    for name in by_layer:
        if str(name).startswith(REGEX):
            check_pattern(_FIELDS[0], str(name))
    return {str(name): field for name, field in by_layer.items()}


def declares(quant_config: Mapping[str, Any], layer: str) -> bool:
    """Whether a configuration without weights says that a layer is quantized. Raises ValueError like `read_form`."""
    if any(names_layer(pattern, layer) for pattern in _excluded(quant_config)):
        return False
    quant_type = quant_config.get("quant_type")
    by_layer = _stated_by_layer(quant_type.get("default") if isinstance(quant_type, Mapping) else quant_type)
    patterns = (name for name in by_layer if name.startswith(REGEX) and _matches(name, layer))
    key = next((name for name in (layer, f"{layer}.weight") if name in by_layer), None) or next(patterns, "_default")
    return by_layer.get(key) is not None


def _matches(pattern: str, layer: str) -> bool:
    """Whether a pattern is that of the whole name."""
    return names_layer(f"{REGEX}(?:{pattern.removeprefix(REGEX)})$", layer)


def _form(quant_config: Mapping[str, Any], kind: Any, fields: Any) -> Form:
    if str(kind) not in _KINDS:
        names = " or ".join(name for name in _KINDS if name[0].isupper())
        raise ValueError(f"its weights are of {kind}, not of {names}")
    weights, inputs = _KINDS[str(kind)]
    excluded = _excluded(quant_config)
    fields = fields if isinstance(fields, Mapping) else {}
    try:
        match weights:
            case "int8":
                return _int8(inputs, fields)
            case "int4":
                return _int4(fields)
            case "fp8":
                return Form(weights, fp8=_fp8(fields, excluded)._replace(inputs=inputs == "dynamic"))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"its quant_type has an invalid value ({type(error).__name__}: {error})") from error


def _int8(inputs: Inputs, fields: Mapping[str, Any]) -> Form:
    size, granularity = fields.get("group_size"), _name(fields.get("granularity"))
    if size not in (None, -1):
        raise ValueError(f"its int8 weights have a scale per {size} inputs, not per row")
    if granularity not in ("", "PerRow"):
        raise ValueError(f"its int8 weights have scales of {granularity}, not PerRow")
    return Form("int8", inputs)


def _int4(fields: Mapping[str, Any]) -> Form:
    packing = _name(fields.get("int4_packing_format")).lower()
    if packing not in ("", "plain"):
        raise ValueError(f"its 4-bit weights are packed for kernels ({packing}), not plain")
    group = _count(fields.get("group_size") or _GROUP)
    if group < 1 or group % BLOCK:
        raise ValueError(f"its groups have {group} inputs, not a multiple of {BLOCK}")
    return Form("int4", group=group)


def _fp8(fields: Mapping[str, Any], excluded: tuple[str, ...]) -> Fp8Form:
    dtype, packing = _name(fields.get("weight_dtype")), _name(fields.get("packing_format")).lower()
    if dtype not in ("", "float8_e4m3fn"):
        raise ValueError(f"its weights are of {dtype}, not float8_e4m3fn")
    if packing not in ("", "plain"):
        raise ValueError(f"its FP8 weights are packed for kernels ({packing}), not plain")
    granularity = fields.get("granularity")
    if isinstance(granularity, Sequence) and not isinstance(granularity, str):
        granularity = granularity[-1]  # of inputs, then of weights
    sizes: Mapping[str, Any] = granularity.get("_data") or {} if isinstance(granularity, Mapping) else {}
    match _name(granularity):
        case "" | "PerRow" | "PerTensor":
            block = None
        case "PerGroup":
            block = (1, _count(sizes.get("group_size")))
        case "PerBlock":
            block_size = sizes.get("block_size")
            if not isinstance(block_size, list) or len(block_size) != 2:
                raise ValueError(f"its quant_type has the block {block_size!r}, which is no pair of sizes")
            block = (_count(block_size[0]), _count(block_size[1]))
        case other:
            raise ValueError(f"its FP8 weights have scales of {other}, not PerRow, PerTensor, PerGroup or PerBlock")
    form = with_block(Fp8Form(excluded=excluded, weight=DATA, scales=(SCALE,)), block)
    if isinstance(form, str):
        raise ValueError(form)
    return form


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


def _excluded(quant_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers that a configuration without weights leaves unquantized. Raises ValueError with a clause."""
    try:
        return (*stated_names(quant_config, "modules_to_not_convert"), "lm_head")
    except ValueError as error:
        raise ValueError(f"its {error}") from error


def form_of(model: StoredModel) -> Form:
    """Raises ModelError if the configuration is not supported."""
    try:
        return read_form(model.facts.config.get("quantization_config") or {})
    except ValueError as error:
        raise ModelError("unsupported_quantization", model.facts.path, str(error), REMEDY) from error


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: of linear layers."""
    try:
        form = read_form(config)
    except ValueError as error:
        raise UnknownStorage(str(error)) from error

    def layout(outputs: int, inputs: int) -> Mapping[str, int]:
        elements = outputs * inputs
        match form.weights:
            case "int8":
                return {"int8": elements + outputs, "float32": outputs}
            case "int4":
                return {"int8": elements // 2, dtype: 2 * outputs * ceil(inputs, form.group)}
        return {DTYPE: elements, "float32": prod(form.fp8.held.scale_shape(outputs, inputs))}

    def counts(matrix: StoredMatrix) -> Mapping[str, int] | None:
        return (
            layout(matrix.outputs, matrix.inputs) if or_unknown_storage(lambda: declares(config, matrix.name)) else None
        )

    return linear_layers(counts)


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or str(quant_config.get("quant_method", "")).lower() != NAME:
        return False
    try:
        return bool(read_form(quant_config))
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
    quantized_names = {name: _is_quantized(model, form, name) for name in names}
    if not any(quantized_names.values()):
        return False
    if not all(quantized_names.values()):
        quantized, plain = (
            next(name for name, value in quantized_names.items() if value is kind) for kind in (True, False)
        )
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
    factors = [factor for name in names if (factor := f"{name}.{_FACTOR}") in model.types]
    if factors:
        shown = model.stored_names.get(factors[0], factors[0])
        _refuse(model, f"inputs are multiplied by {shown}, which no layer does")


def check_embedding(model: StoredModel, name: str) -> None:
    """Raises ModelError (unsupported_quantization) for an embedding with quantized weights."""
    if f"{name}.{DATA}" in model.types:
        _refuse(model, f"{name}.{DATA} holds quantized weights, and no embedding layer of torchao's formats does")


def _is_quantized(model: StoredModel, form: Form, name: str) -> bool:
    """Whether a layer is quantized: its tensors say so; without weights, the configuration does."""
    if model.types:
        stored = [suffix for suffix in (DATA, SCALE, ZERO) if f"{name}.{suffix}" in model.types]
        if stored:
            _check(model, form, name, stored)
        return bool(stored)
    return declares(model.facts.config.get("quantization_config") or {}, name)


def _check(model: StoredModel, form: Form, name: str, stored: Sequence[str]) -> None:
    """Raises ModelError unless the headers of the tensors of a layer fit each other. Zeros of int8 may be left out."""
    path = model.facts.path
    missing = [part for part in (DATA, SCALE, *((ZERO,) if form.weights == "int4" else ())) if part not in stored]
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
        stored_shape = model.shapes[f"{name}.{suffix}"]
        if suffix != DATA and stored_shape != expected:
            needed = f"but its weights {list(shape)} need {list(expected)}"
            reason = f"{name}.{suffix} has the shape {list(stored_shape)}, {needed}"
            raise ModelError("shape_mismatch", path, reason, DOWNLOAD_REMEDY)


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `are_quantized`, and for a configuration that is not supported."""
    form = form_of(model)
    quantized = form.held

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Scheme | None:
        if embedding:
            check_embedding(model, names[0])
        return None if embedding or not are_quantized(model, form, names, inputs) else quantized

    return scheme


def _matrix_shape(model: StoredModel, layer: str) -> tuple[int, int] | None:
    if form_of(model).weights != "int4":
        return shape_of_bytes(model, layer, DATA)
    shape = model.shapes.get(f"{layer}.{DATA}", ())
    return (shape[0], shape[1] * 2) if len(shape) == 2 else None


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
    sharding=None,
    schemes=schemes,
    row_tensors=("weight", "weight_scale"),
    packed=True,
    matrix_shape=_matrix_shape,
    fused_experts=True,
    dequantizable=True,
    of_form=_of_form,
    stored=stored,
)

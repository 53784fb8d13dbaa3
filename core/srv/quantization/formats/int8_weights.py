"""Checkpoints with int8 weights: which layers are int8, and what their headers must show. Torch-free.

Owns the comparison of a layer's stored tensors with those that its kind of layer has. Must not know configurations.

    weight         int8 [out, in]; a layer with a weight of another dtype is not quantized
    weight_scale   a float per output channel, [out, 1] or [out], or one for all of them
    input_scale    of static activations, one float; others are quantized at run time with a scale per token, or not
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.checkpoints.text_names import needed_tensors
from srv.quantization.formats.layer_patterns import names_layer, stated_names
from srv.quantization.method import DOWNLOAD_REMEDY, UP_PROJECTION, StoredModel
from srv.quantization.schemes import SCALE, Inputs, Int8, LayerSchemes

if TYPE_CHECKING:
    from srv.specs import ModelFacts

INT8 = "int8"
UNQUANTIZED = "FLOAT"
INPUT_SCALE = "input_scale"
STATIC_ROWS = ("deq_scale", "quant_bias")  # of layers with static activations, a value per output
_LM_HEAD = "lm_head"
# The linear layers within decoder layers, by their names; not routers and gates, which tools leave as they are.
_LINEAR = ("_proj", "_proj_with_mqa", ".in_proj_qkvz", ".in_proj_ba")
_SCALE_SHAPES: tuple[tuple[str | int, ...], ...] = (("out", 1), ("out",), (), (1,), (1, 1))
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
    int8 = (name for name, tensor in needed_tensors(model).items() if tensor.dtype == INT8 and ".experts." in name)
    return _EXPERTS_NOTE if any(int8) else ""


def check_experts(model: StoredModel, names: Sequence[str]) -> None:
    """Raises ModelError (unsupported_quantization) for int8 projections of experts that have biases, if any does."""
    experts = f"{names[0].partition('.experts.')[0]}.experts"
    biases = (f"{names[0]}.bias", f"{experts}.gate_up_proj_bias", f"{experts}.down_proj_bias")
    if bias := next((bias for bias in biases if bias in model.types), None):
        reason = f"the experts {experts} are int8 and have biases ({bias}), which experts of int8 cannot have"
        raise ModelError("unsupported_quantization", model.facts.path, reason, EXPERTS_REMEDY)


class Int8Form(NamedTuple):
    """How int8 layers multiply. inputs: how their inputs are quantized. excluded: patterns of unquantized layers."""

    inputs: Inputs = "dynamic"
    excluded: tuple[str, ...] = ()

    @property
    def held(self) -> Int8:
        """What layers hold the weights as."""
        return Int8(self.inputs)


class QuantDescription:
    """The quantization types of a checkpoint's linear layers. `quant_types`: by the name of the weight tensor."""

    def __init__(self, path: str, quant_types: Mapping[str, str]) -> None:
        self._path, self._quant_types = path, quant_types

    def by_names(self, stored_names: Mapping[str, str]) -> QuantDescription:
        """The same by the names that layers have; `stored_names`: of `StoredModel`."""
        types = self._quant_types
        own_types = {name: types[stored] for name, stored in stored_names.items() if stored in types}
        return QuantDescription(self._path, {**types, **own_types})

    def __bool__(self) -> bool:
        """Whether any layer is quantized."""
        return any(quant_type != UNQUANTIZED for quant_type in self._quant_types.values())

    def quant_type(self, names: Iterable[str]) -> str:
        """The type of layers that are fused into one; UNQUANTIZED for those not described.

        Raises ModelError (unsupported_quantization) if the layers differ.
        """
        types = {name: self.of_weight(f"{name}.weight") for name in names}
        if len(set(types.values())) > 1:
            differences = ", ".join(f"{name} is {quant_type}" for name, quant_type in types.items())
            raise ModelError(
                "unsupported_quantization",
                self._path,
                f"layers that share one input are quantized differently ({differences})",
                "Quantize them alike: in the list of layers that stay FLOAT, name all of them or none",
            )
        return next(iter(types.values()))

    def of_weight(self, name: str) -> str:
        """The type of one weight tensor."""
        return self._quant_types.get(name, UNQUANTIZED)


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
    extra = [tensor for tensor in _stored(model, layer) if tensor not in tensors and tensor not in ignored]
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
        if list(stored_shape := model.shapes[name]) not in expected:
            fits = " or ".join(map(str, expected))
            reason = f"{name} has the shape {list(stored_shape)}, but its weights {list(shape)} need {fits}"
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


def check_unquantized_up_projections(model: StoredModel) -> None:
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


class DeclaredDescription(QuantDescription):
    """The types of layers as a configuration declares them: all linear layers are int8, except those it ignores."""

    def __init__(self, path: str, ignored: Iterable[str]) -> None:
        super().__init__(path, {})
        self._ignored = tuple(ignored)

    def __bool__(self) -> bool:
        return True

    def of_weight(self, name: str) -> str:
        layer = name.removesuffix(".weight")
        linear = layer == _LM_HEAD or (layer.endswith(_LINEAR) and not layer.endswith(UP_PROJECTION))
        return INT8 if linear and not any(names_layer(pattern, layer) for pattern in self._ignored) else UNQUANTIZED


def read_description(model: StoredModel) -> QuantDescription:
    """The quantization types of a checkpoint's layers.

    They follow from the dtypes of the stored tensors; without weights, from the configuration.
    """
    facts = model.facts
    if model.types:
        int8_names = (name for name, dtype in model.types.items() if dtype == INT8)
        return QuantDescription(facts.path, {name: INT8 for name in int8_names if name.endswith(".weight")})
    quantization_config = facts.config.get("quantization_config")
    declared = quantization_config if isinstance(quantization_config, Mapping) else {"ignore": (_LM_HEAD,)}
    return DeclaredDescription(str(Path(facts.path) / "config.json"), stated_names(declared, "ignore"))


def are_int8(
    model: StoredModel, description: QuantDescription, scheme: Int8Form, names: tuple[str, ...], inputs: int
) -> bool:
    """Whether layers that share one input are int8: those that a linear layer fuses, or projections of experts.

    Raises ModelError: unsupported_quantization for layers that differ, and for experts that no layer holds; others for
    damaged ones, like `check_int8`.
    """
    beside = _beside(scheme)
    for name in names if model.types else ():
        if description.of_weight(f"{name}.weight") == INT8:
            check_int8(model, name, inputs, beside)
        else:
            check_unquantized(model, name)
    is_int8 = description.quant_type(names) == INT8
    if is_int8 and ".experts." in names[0] and scheme.inputs == "static":
        experts = f"{names[0].partition('.experts.')[0]}.experts"
        reason = f"the experts {experts} are int8 with static activations, which no layers support"
        raise ModelError("unsupported_quantization", model.facts.path, reason, EXPERTS_REMEDY)
    return is_int8


def _beside(scheme: Int8Form) -> dict[str, Beside]:
    beside = {SCALE: Beside(FLOATS, _SCALE_SHAPES)}
    return beside | {INPUT_SCALE: Beside(FLOATS, ((), (1,)))} if scheme.inputs == "static" else beside


def check_up_projections(model: StoredModel, scheme: Int8Form) -> None:
    """Check, likewise, the up-projections of latent attention, which are dequantized at load: no linear layers here."""
    for name in model.types:
        layer, _, suffix = name.rpartition(".")
        if not layer.endswith(UP_PROJECTION) or suffix != "weight":
            continue
        if model.types[name] == INT8:
            check_int8(model, layer, model.shapes[name][-1], _beside(scheme))
        elif model.types[name] in FLOATS:
            check_unquantized(model, layer)


def schemes(model: StoredModel, form: Int8Form) -> LayerSchemes:
    """Raises ModelError as `are_int8`."""
    description, quantized = read_description(model), form.held
    check_up_projections(model, form)

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Int8 | None:
        if embedding:
            check_unquantized(model, names[0])
        return None if embedding or not are_int8(model, description, form, names, inputs) else quantized

    return scheme

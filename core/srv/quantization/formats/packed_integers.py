"""Checkpoints with integers of 4 or 8 bits that are packed into words: AWQ, GPTQ and compressed-tensors. Torch-free.

Owns which layers are quantized, what headers must show of them, and in which blocks the layers hold them. Weights are
repacked at load into the quantization blocks of GGUF files, so that every platform computes with the products that it
has for these (`linear_gguf`, `experts_gguf`), and never through a copy in floats (docs/adr/0070-packed-integers.md).
Must not know configurations, nor how words are packed: `srv.quantization.formats.packed_words` does.

    method               tensors of a linear layer [N, K], with groups of g inputs
    awq                  qweight, qzeros, scales                          zeros as they are, also if all are 8
    gptq                 qweight, qzeros, scales, g_idx                   zeros less 1, except in the format gptq_v2;
                                                                          no g_idx of AutoRound's
    compressed-tensors   weight_packed, weight_scale, weight_shape        [weight_zero_point, weight_g_idx]

The up-projection of latent attention, which is no linear layer here, is dequantized at load.

    w = scale * (q - zero)    4 bits: Q4_0 if the zero is 8, else Q4_1    8 bits: Q8_0, whose zero is 128

(Formats: the source code of AutoAWQ, GPTQModel and compressed-tensors)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.formats.layer_patterns import names_layer, stated_names
from srv.quantization.method import (
    DOWNLOAD_REMEDY,
    UP_PROJECTION,
    QuantMethod,
    StoredModel,
)
from srv.quantization.schemes import Blocks, LayerSchemes

Layout: TypeAlias = Literal["awq", "gptq", "rows"]
BLOCK = 32  # weights in one of the blocks that layers hold
SCALES = ("scales", "weight_scale")
_INDICES = ("g_idx", "weight_g_idx", "weight_shape")  # integers that are not packed
REMEDY = "Use another checkpoint of the model, or a GGUF file"
_LM_HEAD = "lm_head"
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})  # which tools leave as they are
LINEAR = "Linear"  # the class of all linear layers, as a target of compressed-tensors
# The suffixes of the tensors of a quantized layer. The first is that of its packed integers.
SUFFIXES: Mapping[Layout, tuple[str, ...]] = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "rows": ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
}


class PackedForm(NamedTuple):
    """How the quantized layers of a checkpoint are packed.

    bits: of an integer, 4 or 8. group: inputs that share a scale, 0 for all of them. symmetric: zeros are the middle of
    the range. ordered: inputs belong to groups in any order, which a tensor gives. zero_offset: what is added to stored
    zeros. excluded: names of layers that are not quantized, as the configuration states them. interleaved: integers are
    in words in the order that kernels of AWQ want. indexed: there is a tensor of the groups of inputs, in GPTQ.
    """

    layout: Layout
    bits: int
    group: int
    symmetric: bool
    ordered: bool = False
    zero_offset: int = 0
    excluded: tuple[str, ...] = ()
    interleaved: bool = False
    indexed: bool = True

    @property
    def block_type(self) -> str:
        """The GGUF type of the blocks that layers hold."""
        if self.bits == 8:
            return "Q8_0"
        return "Q4_0" if self.symmetric else "Q4_1"

    @property
    def held(self) -> Blocks:
        return Blocks((self.block_type,), self.ordered)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Those of the tensors that every quantized layer has."""
        names = SUFFIXES[self.layout]
        if self.layout != "rows":
            return names if self.indexed else names[:3]
        return (*names[:3], *(names[3:4] if not self.symmetric else ()), *(names[4:] if self.ordered else ()))


def grouped(form: PackedForm) -> PackedForm | str:
    """The form, or a clause if blocks do not have its groups."""
    if form.group % BLOCK:
        return f"its groups have {form.group} inputs, not a multiple of {BLOCK}"
    return form


def first(quant_config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The first field of these that is stated."""
    return next((quant_config[name] for name in names if quant_config.get(name) is not None), default)


def group_of(quant_config: Mapping[str, Any]) -> int:
    """Inputs per scale; 0 for one scale of all inputs, as -1 and null say."""
    return max(0, int(first(quant_config, "group_size", "q_group_size", default=0)))


def excluded_of(quant_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers that are not quantized, with the output layer unless the configuration says that it is."""
    excluded = stated_names(quant_config, "modules_to_not_convert")
    return excluded if quant_config.get("lm_head") else (*excluded, _LM_HEAD)


def check_tensors(
    model: StoredModel, form: PackedForm, layer: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int]:
    """The sizes of a quantized layer, by the shapes of its tensors, which their suffixes name.

    Raises ModelError if tensors are missing, left over, or have other shapes or dtypes; and unsupported_quantization
    for rows that cannot be blocks.
    """

    def fail(code: str, reason: str) -> NoReturn:
        raise ModelError(code, model.facts.path, reason, DOWNLOAD_REMEDY)

    if missing := [suffix for suffix in form.suffixes if suffix not in shapes]:
        fail("missing_tensors", f"it lacks {layer}.{missing[0]}")
    if extra := [suffix for suffix in shapes if suffix not in form.suffixes]:
        fail("unexpected_tensors", f"it has {layer}.{extra[0]}, which its quantization_config does not state")
    for suffix in shapes:
        dtypes = FLOATS if suffix in SCALES else ("int32", "int64") if suffix in _INDICES else ("int32",)
        if (dtype := model.types.get(f"{layer}.{suffix}", dtypes[0])) not in dtypes:
            fail("dtype_mismatch", f"{layer}.{suffix} is stored as {dtype}, not as {' or '.join(dtypes)}")
    first = shapes[form.suffixes[0]]
    if len(first) != 2:
        fail("shape_mismatch", f"{layer}.{form.suffixes[0]} has the shape {list(first)}, not two axes")
    outputs, inputs = unpacked_shape(form.layout, first, 32 // form.bits)
    if (unfit := unfit_inputs(form, inputs, layer)) is not None:
        fail("unsupported_quantization", unfit)
    expected = _tensor_shapes(form, outputs, inputs)
    for suffix, shape in shapes.items():
        if shape != expected.get(suffix, shape):
            reason = f"{layer}.{suffix} has the shape {list(shape)}, but {list(expected[suffix])} fits its weights"
            fail("shape_mismatch", f"{reason} and groups of {form.group or inputs} inputs")
    return outputs, inputs


def _tensor_shapes(form: PackedForm, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors beside the packed integers."""
    groups = -(-inputs // form.group) if form.group else 1
    words = -(-outputs // (32 // form.bits))
    return {
        "scales": (groups, outputs),
        "qzeros": (groups, words),
        "g_idx": (inputs,),
        "weight_scale": (outputs, groups),
        "weight_zero_point": (words, groups),
        "weight_g_idx": (inputs,),
        "weight_shape": (2,),
    }


def unfit_inputs(form: PackedForm, inputs: int, layer: str) -> str | None:
    """The clause that says why rows of a layer cannot be blocks; None if they can."""
    if inputs % BLOCK or (form.group and inputs % form.group):
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


def matrix_shape(model: StoredModel, form: PackedForm, layer: str) -> tuple[int, int] | None:
    """As `QuantMethod.matrix_shape`."""
    shape = model.shapes.get(f"{layer}.{form.suffixes[0]}", ())
    return unpacked_shape(form.layout, shape, 32 // form.bits) if len(shape) == 2 else None


def is_packed(form: PackedForm, types: Mapping[str, str], name: str) -> bool:
    """Whether a linear layer is quantized: its tensors say so; without weights, the configuration does."""
    if types:
        return f"{name}.{form.suffixes[0]}" in types
    return _ROUTERS.isdisjoint(name.split(".")) and not any(names_layer(pattern, name) for pattern in form.excluded)


def are_packed(model: StoredModel, form: PackedForm, names: Sequence[str], inputs: int) -> bool:
    """Whether layers that share one input are quantized: those that a linear layer fuses, or projections of experts.

    Raises ModelError: unsupported_quantization for those that layers cannot hold as blocks; missing_tensors,
    unexpected_tensors, dtype_mismatch and shape_mismatch for damaged ones.
    """
    packed = {name: is_packed(form, model.types, name) for name in names}
    for name in names if model.types else ():
        _check_stored(model, form, name)
    if not any(packed.values()):
        return False
    reason = unfit_inputs(form, inputs, names[0])
    if not all(packed.values()):
        quantized, plain = (next(name for name, value in packed.items() if value is kind) for kind in (True, False))
        reason = f"of layers that share one input, {quantized} is quantized and {plain} is not"
    if reason is not None:
        raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)
    return True


def _check_stored(model: StoredModel, form: PackedForm, name: str) -> None:
    """Check the tensors of a layer, if it has any that unquantized layers do not have."""
    stored = [suffix for suffix in SUFFIXES[form.layout] if f"{name}.{suffix}" in model.types]
    plain = f"{name}.weight" in model.types
    if form.suffixes[0] in stored and plain:
        reason = f"it has both {name}.{form.suffixes[0]} and {name}.weight"
        raise ModelError("unexpected_tensors", model.facts.path, reason, DOWNLOAD_REMEDY)
    if stored and not plain:
        check_tensors(model, form, name, {suffix: model.shapes[f"{name}.{suffix}"] for suffix in stored})


def check_dequantized(model: StoredModel, form: PackedForm) -> None:
    """Raises ModelError, as `are_packed`, for damaged weights that are dequantized at load."""
    layers = {name.rpartition(".")[0] for name in model.types}
    for layer in sorted(layer for layer in layers if layer.endswith(UP_PROJECTION)):
        _check_stored(model, form, layer)


def schemes(model: StoredModel, form: PackedForm) -> LayerSchemes:
    """Raises ModelError as `are_packed`."""
    quantized = form.held
    check_dequantized(model, form)

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Blocks | None:
        return None if embedding or not are_packed(model, form, names, inputs) else quantized

    return scheme


def method(
    name: str, read_form: Callable[[Mapping[str, Any]], PackedForm | str], storage: str, **facts: Any
) -> QuantMethod:
    """The facts of a method whose weights are packed integers.

    `read_form(quantization_config)`: the form of a checkpoint of the method; a clause if layers do not support it; ""
    if it is another method's.
    """

    def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
        form = read(name, read_form, config)
        return True if isinstance(form, PackedForm) else form or False

    def of_model(model: StoredModel) -> LayerSchemes:
        if read(name, read_form, model.facts.config) == "":  # the value of --quantization is refused
            return lambda names, inputs, embedding: None
        return schemes(model, form_of(name, read_form, model))

    def shape_of_model(model: StoredModel, layer: str) -> tuple[int, int] | None:
        return matrix_shape(model, form_of(name, read_form, model), layer)

    return QuantMethod(
        name=name,
        storage=storage,
        ops=("linear_gguf",),
        detect=detect,
        sharding=None,
        schemes=of_model,
        packed=True,
        matrix_shape=shape_of_model,
        turns_inputs=True,
        row_tensors=("weight",),
        up_projections=True,
        dequantizable=True,
        **facts,
    )


def read(
    name: str, read_form: Callable[[Mapping[str, Any]], PackedForm | str], config: Mapping[str, Any]
) -> PackedForm | str:
    """The form; a clause if the layers do not support it; "" if it is of another method."""
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or str(quant_config.get("quant_method", "")).lower() != name:
        return ""
    try:
        return read_form(quant_config)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({error})"


def form_of(name: str, read_form: Callable[[Mapping[str, Any]], PackedForm | str], model: StoredModel) -> PackedForm:
    """That of a checkpoint that was detected. Raises ModelError if its configuration is damaged."""
    form = read(name, read_form, model.facts.config)
    if isinstance(form, PackedForm):
        return form
    reason = form or "its quantization_config is not that of packed integers"
    raise ModelError("unsupported_quantization", model.facts.path, reason, "Use another checkpoint of the model")

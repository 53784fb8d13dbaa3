"""Checkpoints with FP8 weights (float8_e4m3fn): which layers are quantized, and how their scales are stored.

Owns what is checked before weights are read: that each FP8 weight has a scale of a shape that fits it. Torch-free. The
fields of each configuration are read by the module of its format; the classes of layers are in
`srv.quantization.layers`.

    weight                          float8_e4m3fn [N, K]; a layer with a weight of another float dtype is not quantized
    weight_scale, weight_scale_inv  what weights are multiplied by: one value, [N], [N, 1], or one per block
    input_scale and the like        of static activations; checked only, since no op takes it
    experts.gate_up_proj            of all experts of a layer, and its scales: `srv.models.checkpoints.expert_tensors`
    k_scale, v_scale and the like   of an FP8 KV pool, if there is one (`srv.planning.kv_scales`); not read here

The up-projection of latent attention, which is no linear layer here, is dequantized at load.

Layers hold a scale per output, or per block (docs/adr/0071-fp8-weights.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.checkpoints.expert_tensors import expert_tensor, is_weight_of_all_experts, scale_name
from srv.quantization.formats.layer_patterns import names_any
from srv.quantization.method import DOWNLOAD_REMEDY, UP_PROJECTION, QuantMethod, StoredModel
from srv.quantization.schemes import SCALE, Fp8, LayerSchemes

if TYPE_CHECKING:
    from srv.specs import ModelFacts

DTYPE = "float8_e4m3fn"
INPUT_SCALES = ("input_scale", "activation_scale", "act_scale", "input_scale_ub", "activation_scale_ub")
REMEDY = "Use another checkpoint of the model"
NOTE = "its FP8 weights are multiplied by activations in the model's dtype, whatever the checkpoint states of these"
_INPUTS = 32  # blocks have a multiple of so many inputs
_LARGEST = 1 << 20  # outputs and inputs of a block; no matrix has more
# The linear layers within decoder layers, by their names; not routers and gates, which tools leave as they are, nor the
# up-projection, which is no linear layer here.
_LINEAR = ("_proj", "_proj_with_mqa", ".in_proj_qkvz", ".in_proj_ba")
_LM_HEAD = "lm_head"
_SCALE_DTYPES = (*FLOATS, "float8_e8m0fnu")


class Fp8Form(NamedTuple):
    """How the FP8 weights of a checkpoint are stored and scaled.

    block: (outputs, inputs) that share a scale; None: each output has one, or the whole weight. excluded: patterns of
    layers that are not quantized, as the configuration states them. head: the output layer is quantized unless it is
    excluded. weight, scales: the suffixes of stored weights, and those that their scales may have. inputs: it states
    that the inputs of these layers are quantized to FP8 as well, with dynamic or static scales.
    """

    block: tuple[int, int] | None = None
    excluded: tuple[str, ...] = ()
    head: bool = False
    weight: str = "weight"
    scales: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
    inputs: bool = False

    @property
    def held(self) -> Fp8:
        """What layers hold the weights as."""
        return Fp8(self.block)


class ScaledWeight(NamedTuple):
    """An FP8 weight [outputs, inputs] of a checkpoint. `scale`: the name of its scale, which has `scale_shape`."""

    outputs: int
    inputs: int
    scale: str
    scale_shape: tuple[int, ...]


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[rows, 1, columns, 1], which one tool stores, as [rows, columns]."""
    return (shape[0], shape[2]) if len(shape) == 4 and (shape[1], shape[3]) == (1, 1) else shape


def scale_fits(form: Fp8Form, weight: ScaledWeight) -> bool:
    """Whether a stored scale is one of the form for this weight."""
    shape, expected = squeezed(weight.scale_shape), form.held.scale_shape(weight.outputs, weight.inputs)
    if form.block is not None:
        return shape == expected or (shape == () and expected == (1, 1))
    return math.prod(shape) == 1 or shape in (expected, expected[:1])


def are_fp8(model: StoredModel, form: Fp8Form, names: Sequence[str]) -> bool:
    """Whether layers that share one input have FP8 weights: those that a linear layer fuses, or projections of experts.

    Their tensors say so; without weights, the configuration does. Raises ModelError: unsupported_quantization for
    weights that layers cannot hold; missing_tensors, dtype_mismatch and shape_mismatch for damaged ones.
    """
    stored = {name: _is_stored(model, form, name) for name in names} if model.types else {}
    is_fp8 = stored or {name: declares(form, name) for name in names}
    if len(set(is_fp8.values())) > 1:
        fp8, plain = (next(name for name, value in is_fp8.items() if value is kind) for kind in (True, False))
        reason = f"of layers that share one input, {fp8} is FP8 and {plain} is not"
        raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)
    return next(iter(is_fp8.values()))


def _is_stored(model: StoredModel, form: Fp8Form, name: str) -> bool:
    stored = f"{name}.{form.weight}"
    dtype, path = model.types.get(stored), model.facts.path
    scale = next((tensor for suffix in form.scales if (tensor := f"{name}.{suffix}") in model.types), None)
    if dtype is None and scale is not None:
        scale = model.stored_names.get(scale, scale)
        raise ModelError("missing_tensors", path, f"it lacks {stored}, which {scale} scales", DOWNLOAD_REMEDY)
    if dtype is None or dtype in FLOATS:
        return False  # if it is missing, the loader says so
    shown = model.stored_names.get(stored, stored)
    if dtype != DTYPE:
        reason = f"{shown} is stored as {dtype}, not as {DTYPE}"
        raise ModelError("unsupported_quantization", path, reason, REMEDY)
    if scale is None:
        lacked = scale_name(shown) if is_weight_of_all_experts(shown) else f"{name}.{form.scales[0]}"
        reason = f"it lacks {lacked}, by which the FP8 values of {shown} are multiplied"
        raise ModelError("missing_tensors", path, reason, DOWNLOAD_REMEDY)
    if model.types[scale] not in _SCALE_DTYPES:
        reason = f"{model.stored_names.get(scale, scale)} is stored as {model.types[scale]}, not as a float"
        raise ModelError("dtype_mismatch", path, reason, DOWNLOAD_REMEDY)
    shape = model.shapes[stored]
    if len(shape) != 2:
        reason = f"{stored} has the shape {list(shape)}, which is no matrix"
        raise ModelError("shape_mismatch", path, reason, DOWNLOAD_REMEDY)
    outputs, inputs = shape
    weight = ScaledWeight(outputs, inputs, scale, model.shapes[scale])
    if is_weight_of_all_experts(shown):
        _check_halves(model, form, weight, shown)
    if not scale_fits(form, weight):
        expected = form.held.scale_shape(weight.outputs, weight.inputs)
        of = "one per output, or one" if form.block is None else "blocks of {} x {}".format(*form.block)
        part = f" for {name}" if is_weight_of_all_experts(shown) else ""
        reason = f"{model.stored_names.get(scale, scale)} has the shape {list(weight.scale_shape)}{part}, but its "
        reason += f"weights {list(shape)} need {list(expected)} ({of})"
        raise ModelError("shape_mismatch", path, reason, DOWNLOAD_REMEDY)
    return True


def _check_halves(model: StoredModel, form: Fp8Form, weight: ScaledWeight, shown: str) -> None:
    """Refuse a tensor in which rows of gate and up projection share a scale. `shown`: its name.

    transformers stores two rows of scales, one for each of them, where both have fewer rows than a block.
    """
    expert = expert_tensor(shown)
    if form.block is None or expert is None or len(expert.projections) == 1:
        return
    rows, outputs = form.block[0], weight.outputs
    own_rows = 2 * outputs <= rows and weight.scale_shape[:1] in ((), (1,))
    if outputs % rows and not own_rows:
        reason = f"the {outputs} rows of the gate in {shown} end within a block of {rows} rows, which share a scale"
        raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)


def check_embedding(model: StoredModel, name: str) -> None:
    """Raises ModelError (unsupported_quantization) for an embedding with FP8 weights."""
    if model.types.get(f"{name}.weight") == DTYPE:
        reason = f"{name}.weight is stored as {DTYPE}, and no embedding layer supports that"
        raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)


def check_dequantized(model: StoredModel, form: Fp8Form) -> None:
    """Raises ModelError like `are_fp8` for the FP8 weights that are dequantized at load: those of no linear layer."""
    for name in model.types:
        layer, _, suffix = name.rpartition(".")
        packed = f"{layer}.weight_packed" in model.types  # of another group of layers
        if layer.endswith(UP_PROJECTION) and suffix in (form.weight, *form.scales) and not packed:
            _is_stored(model, form, layer)


def declares(form: Fp8Form, layer: str) -> bool:
    """Whether the configuration of a checkpoint without weights says that a layer is quantized."""
    linear = form.head if layer == _LM_HEAD else layer.endswith(_LINEAR) and not layer.endswith(UP_PROJECTION)
    return linear and not names_any(form.excluded, layer)


def with_block(form: Fp8Form, size: Any) -> Fp8Form | str:
    """The form with blocks of these sizes, as [128, 128] or "128x128"; None for none."""
    if size is None:
        return form
    sizes = size.lower().split("x") if isinstance(size, str) else size
    try:
        outputs, inputs = (int(size) for size in sizes)
    except (TypeError, ValueError, OverflowError):
        return f"its blocks are {size!r}, not a number of outputs and one of inputs"
    if min(outputs, inputs) < 1 or max(outputs, inputs) > _LARGEST or inputs % _INPUTS:
        return f"its blocks are {outputs} x {inputs}, not sizes up to {_LARGEST}, the inputs a multiple of {_INPUTS}"
    return form._replace(block=(outputs, inputs))


def schemes(model: StoredModel, form: Fp8Form) -> LayerSchemes:
    """Raises ModelError as `are_fp8`."""
    quantized = form.held
    check_dequantized(model, form)

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Fp8 | None:
        if embedding:
            check_embedding(model, names[0])
        return None if embedding or not are_fp8(model, form, names) else quantized

    return scheme


def method(
    name: str, read: Callable[[Path, Mapping[str, Any]], Fp8Form | str | None], storage: str, **facts: Any
) -> QuantMethod:
    """The facts of a method whose weights are FP8.

    `read(folder, config)`: the form of a checkpoint; a clause if layers do not support it; None for other methods.
    """

    def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
        form = read(folder, config)
        return form if isinstance(form, str) else form is not None

    def of_form(model: ModelFacts) -> QuantMethod:
        form = read(Path(model.path), model.config) or Fp8Form()
        return created if isinstance(form, str) else created._replace(fp8_inputs=form.inputs)

    def row_block(model: ModelFacts) -> int:
        form = read(Path(model.path), model.config)
        return form.block[0] if isinstance(form, Fp8Form) and form.block is not None else 1

    created = QuantMethod(
        name=name,
        storage=storage,
        ops=("linear_fp8",),
        detect=detect,
        sharding=None,
        schemes=lambda model: schemes(model, form_of(model, read)),
        row_tensors=("weight", SCALE),
        row_block=row_block,
        up_projections=True,
        fused_experts=True,
        of_form=of_form,
        note=NOTE,
        dequantizable=True,
        **facts,
    )
    return created


def form_of(model: StoredModel, read: Callable[[Path, Mapping[str, Any]], Fp8Form | str | None]) -> Fp8Form:
    """The form of a checkpoint; that of a scale per output if its configuration states no method.

    Raises ModelError unsupported_quantization for a form that layers do not support.
    """
    form = read(Path(model.facts.path), model.facts.config) or Fp8Form()
    if isinstance(form, Fp8Form):
        return form
    raise ModelError("unsupported_quantization", model.facts.path, form, REMEDY)

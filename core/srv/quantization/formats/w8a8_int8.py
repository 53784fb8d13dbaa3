"""Checkpoints of the method w8a8_int8: which layers are int8, and how that is recognised. Torch-free.

Owns the layout that many tools write. Must not know layers, nor how compressed-tensors states the scheme
(`srv.quantization.formats.int8_configs`).

    weight         int8 [out, in]; a layer with a weight of another dtype is not quantized
    weight_scale   a float per output channel, [out, 1] or [out], or one for all of them
    input_scale    of static activations, one float; others are quantized at run time with a scale per token, or not

The up-projection of latent attention, which is no linear layer here, is dequantized at load.

(Format: https://github.com/vllm-project/compressed-tensors, `int-quantized`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.formats.description import UNQUANTIZED, QuantDescription
from srv.quantization.formats.int8_checks import EXPERTS_REMEDY, Beside, check_int8, check_unquantized, experts_note
from srv.quantization.formats.int8_configs import Int8Form, read_compressed, unsupported_names
from srv.quantization.formats.layer_patterns import names_layer, stated_names
from srv.quantization.formats.online import INT8DQ
from srv.quantization.method import UP_PROJECTION, QuantMethod, StoredModel
from srv.quantization.schemes import SCALE, Int8, LayerSchemes

if TYPE_CHECKING:
    from srv.specs import ModelFacts

NAME = "w8a8_int8"
INT8 = "int8"
COMPRESSED_TENSORS = "compressed-tensors"
# Those of other methods: `srv.quantization.formats.packed`, `fp8` and `mxfp4`.
OTHER_FORMATS = ("pack-quantized", "float-quantized", "mxfp4-pack-quantized")
INPUT_SCALE = "input_scale"
STATIC_ROWS = ("deq_scale", "quant_bias")  # of layers with static activations, a value per output
_LM_HEAD = "lm_head"
# The linear layers within decoder layers, by their names; not routers and gates, which tools leave as they are.
_LINEAR = ("_proj", "_proj_with_mqa", ".in_proj_qkvz", ".in_proj_ba")
_SCALE_SHAPES: tuple[tuple[str | int, ...], ...] = (("out", 1), ("out",), (), (1,), (1, 1))


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    """Whether a `quantization_config` describes this method.

    compressed-tensors covers many schemes, of which this method is one; the reason if it is another one.
    """
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return False
    if stated.get("quant_method") == COMPRESSED_TENSORS:
        if stated.get("format") in OTHER_FORMATS:
            return False
        found = read_compressed(stated, OTHER_FORMATS)
        return found if isinstance(found, str) else True
    return stated.get("quant_method") == NAME and (unsupported_names(stated) or True)


def accepts(model: ModelFacts) -> str | None:
    """Why the weights of a checkpoint that names no method are neither int8, nor can be quantized at load."""
    others = sorted(model.stored_types.keys() - FLOATS)
    return None if model.stored_types.get(INT8) or not others else f"some of its weights are stored as {others[0]}"


def _at_load(model: ModelFacts) -> str | None:
    return None if model.stored_types.get(INT8) else INT8DQ.name


def scheme_of(config: Mapping[str, Any]) -> Int8Form:
    """The scheme of a checkpoint; that of a scale per token of activations if compressed-tensors does not state it."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or stated.get("quant_method") != COMPRESSED_TENSORS:
        return Int8Form()
    found = read_compressed(stated, OTHER_FORMATS)
    return Int8Form() if isinstance(found, str) else found  # the checkpoint is refused


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
        return INT8 if linear and not any(names_layer(each, layer) for each in self._ignored) else UNQUANTIZED


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
    found = description.quant_type(names) == INT8
    if found and ".experts." in names[0] and scheme.inputs == "static":
        experts = f"{names[0].partition('.experts.')[0]}.experts"
        reason = f"the experts {experts} are int8 with static activations, which no layers support"
        raise ModelError("unsupported_quantization", model.facts.path, reason, EXPERTS_REMEDY)
    return found


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


def schemes(model: StoredModel, form: Int8Form | None = None) -> LayerSchemes:
    """`form`: None for the one that the configuration of the checkpoint states. Raises ModelError as `are_int8`."""
    description, stored = read_description(model), form or scheme_of(model.facts.config)
    held = stored.held
    check_up_projections(model, stored)

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Int8 | None:
        if embedding:
            check_unquantized(model, names[0])
        return None if embedding or not are_int8(model, description, stored, names, inputs) else held

    return scheme


def _of_form(model: ModelFacts) -> QuantMethod:
    """With the op of its form."""
    scheme = scheme_of(model.config)
    note = experts_note(model) if scheme.inputs == "none" else ""
    return METHOD if scheme == Int8Form() else METHOD._replace(ops=(scheme.held.op,), note=note)


METHOD = QuantMethod(
    name=NAME,
    storage="srv.quantization.formats.w8a8_int8_storage:W8A8StorageFormat",
    ops=("linear_w8a8",),
    detect=detect,
    accepts=accepts,
    sharding="weights quantized to int8 cannot be sharded yet",
    schemes=schemes,
    at_load=_at_load,
    of_form=_of_form,
    row_tensors=("weight", SCALE, *STATIC_ROWS),
    up_projections=True,
)

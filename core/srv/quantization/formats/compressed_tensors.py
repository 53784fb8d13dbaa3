"""Checkpoints of compressed-tensors: what their configurations state, and which layer has which scheme. Torch-free.

Owns the groups of a configuration (`config_groups`), their targets, and what layers that are computed together must
share. Must not know which tensors a scheme has: those modules do that it imports.
Checkpoints whose layers are all FP8, or all int8, are those of the methods `fp8` and `w8a8_int8`, which read the
configuration by `read_float` and `read_int`.

    format of a group                   weights                      op of its layers
    pack-quantized                      integers of 4 or 8 bits      linear_gguf
    float-quantized, naive-quantized    float8_e4m3fn                linear_fp8
    int-quantized, naive-quantized      int8                         linear_w8a8, linear_w8a8_static, linear_int8
    nvfp4-pack-quantized                NVFP4                        none; all groups have it (`compressed_nvfp4`)

The format is that of the group or, if it states none, that of the configuration. In `mixed-precision`, a group without
one has that of its weights (docs/adr/0080-mixed-schemes.md).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.layers.moe_config import expert_names
from srv.quantization.formats import compressed_nvfp4, fp8_weights, int8_weights, packed_integers
from srv.quantization.formats.fp8_weights import Fp8Form, with_block
from srv.quantization.formats.int8_weights import Int8Form
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import matched_target, needs_backtracking, stated_names
from srv.quantization.formats.nvfp4 import NvFp4Form
from srv.quantization.formats.packed_integers import LINEAR, REMEDY, PackedForm, grouped
from srv.quantization.formats.stored_counts import Layout, ceil, is_named, names_of, target_of
from srv.quantization.method import (
    DOWNLOAD_REMEDY,
    QuantMethod,
    StoredCounts,
    StoredMatrix,
    StoredModel,
    UnknownStorage,
    shape_of_bytes,
)
from srv.quantization.schemes import SCALE, LayerSchemes, Scheme

if TYPE_CHECKING:
    from srv.specs import ModelFacts

# The values that fields must have; None means that one is absent.
_SYMMETRIC: Mapping[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
}
_INT8_WEIGHTS = {**_SYMMETRIC, "strategy": ("channel", "tensor"), "dynamic": (False, None)}
_DYNAMIC_INPUTS = {**_SYMMETRIC, "strategy": ("token",)}
_STATIC_INPUTS = {**_SYMMETRIC, "strategy": ("tensor",), "dynamic": (False, None)}
COMPRESSED_TENSORS = "compressed-tensors"
MIXED = "mixed-precision"  # the format of a configuration whose groups have formats of their own
_PACKED, _FLOAT, _INT, _NAIVE = "pack-quantized", "float-quantized", "int-quantized", "naive-quantized"
_FLOAT_FORMATS = (_FLOAT, _NAIVE)  # the latter has integers, too
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+$")
_SCALES = ("weight_scale", "weight_scale_inv")

Form: TypeAlias = PackedForm | Fp8Form | Int8Form
AnyForm = TypeVar("AnyForm")
_KINDS: Mapping[type[Form], str] = {PackedForm: "packed integers", Fp8Form: "FP8", Int8Form: "int8"}


class SchemeGroup(NamedTuple):
    """Layers of one scheme. `name`: as in the configuration. `targets`: names, patterns ("re:...") and classes."""

    name: str
    targets: tuple[str, ...]
    scheme: Form


class MixedForm(NamedTuple):
    """The groups of a checkpoint, and the layers that are in none of them, as the configuration states them."""

    groups: tuple[SchemeGroup, ...]
    excluded: tuple[str, ...] = ()

    def targeted(self, names: Sequence[str]) -> SchemeGroup | None:
        """The group whose target fits a layer best. `names`: that of the layer, and that which its file has for it."""
        by_target = {target: group for group in self.groups for target in group.targets}
        target = matched_target(by_target, names, LINEAR)
        return None if target is None else by_target[target]

    def declared(self, layer: str) -> SchemeGroup | None:
        """The group of a layer of a checkpoint without weights."""
        declares = fp8_weights.declares(Fp8Form(excluded=self.excluded, head=True), layer)
        return self.targeted((layer,)) if declares else None


class StoredGroups:
    """The group of each layer of a model: its tensors say whether it is quantized, and the configuration how."""

    def __init__(self, model: StoredModel, mixed: MixedForm) -> None:
        self._model, self._mixed = model, mixed
        self._stored = {_layer(name): _layer(stored) for name, stored in model.stored_names.items()}
        self._found: dict[str, SchemeGroup | None] = {}
        self._layers = frozenset(map(_layer, model.types))

    def of_layer(self, layer: str) -> SchemeGroup | None:
        """None for an unquantized layer.

        Raises ModelError (unsupported_quantization) for one that is stored otherwise than its group states.
        """
        if layer not in self._found:
            self._found[layer] = self._of_layer(layer) if self._model.types else self._mixed.declared(layer)
        return self._found[layer]

    def of(self, names: Sequence[str]) -> SchemeGroup | None:
        """The group of layers that a linear layer fuses, or of the projections of experts.

        Raises ModelError (unsupported_quantization) if they, or other projections of the same experts, differ.
        """
        experts, shared = _EXPERT.match(names[0]), "of layers that share one input"
        if experts is not None:
            others = itertools.chain(*expert_names(experts[1], 1, "silu"))
            names = (*names, *(name for name in others if name in self._layers or not self._layers))
            shared = "of the experts of one layer"
        by_name = {name: self.of_layer(name) for name in names}
        first = by_name[names[0]]
        other = next((name for name, scheme in by_name.items() if _scheme(scheme) != _scheme(first)), None)
        if other is not None:
            where = " and ".join(f"{name} is {_described(by_name[name])}" for name in (names[0], other))
            self._fail(f"{shared}, {where}, and they are computed together")
        return first

    def _of_layer(self, layer: str) -> SchemeGroup | None:
        kind = _stored_kind(self._model.types, layer)
        stored = self._stored.get(layer)
        group = self._mixed.targeted((layer,) if stored is None else (layer, stored))
        if kind is None:
            self._check_unquantized(layer, group)
            return None
        if group is None:
            self._fail(f"the weights of {layer} are stored as {_KINDS[kind]}, and no group has it as a target")
        if not isinstance(group.scheme, kind):
            declared = _KINDS[type(group.scheme)]
            self._fail(f"the weights of {layer} are stored as {_KINDS[kind]}, and its {group.name} states {declared}")
        return group

    def _check_unquantized(self, layer: str, group: SchemeGroup | None) -> None:
        """Refuse an unquantized layer that has a scale: its weights are damaged, or missing."""
        types, path = self._model.types, self._model.facts.path
        scale = next((name for suffix in _SCALES if (name := f"{layer}.{suffix}") in types), None)
        if scale is None:
            return
        packed_weights = group is not None and isinstance(group.scheme, PackedForm)
        weight = f"{layer}.{'weight_packed' if packed_weights else 'weight'}"
        if weight not in types and f"{layer}.weight" not in types:
            raise ModelError("missing_tensors", path, f"it lacks {weight}, which {scale} scales", DOWNLOAD_REMEDY)
        dtype = types.get(f"{layer}.weight", "")
        code = "unexpected_tensors" if dtype in FLOATS else "dtype_mismatch"
        reason = f"{layer}.weight is stored as {dtype}, and {scale} belongs to quantized weights"
        raise ModelError(code, path, reason, DOWNLOAD_REMEDY)

    def _fail(self, reason: str) -> NoReturn:
        raise ModelError("unsupported_quantization", self._model.facts.path, reason, REMEDY)


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _scheme(group: SchemeGroup | None) -> Form | None:
    return None if group is None else group.scheme


def _described(group: SchemeGroup | None) -> str:
    return "not quantized" if group is None else f"of {group.name}"


def _stored_kind(types: Mapping[str, str], layer: str) -> type[Form] | None:
    if f"{layer}.weight_packed" in types:
        return PackedForm
    match types.get(f"{layer}.weight"):
        case fp8_weights.DTYPE:
            return Fp8Form
        case "int8":
            return Int8Form
    return None


def mixed_form(folder: Path | str, config: Mapping[str, Any]) -> MixedForm:
    """The groups of a checkpoint that `detect` recognised. Raises ModelError if its configuration is damaged."""
    form = _read(config)
    if isinstance(form, MixedForm):
        return form
    reason = form or "its quantization_config does not state groups of layers"
    raise ModelError("unsupported_quantization", str(folder), reason, "Use another checkpoint of the model")


def _read(config: Mapping[str, Any]) -> MixedForm | str:
    """The groups; a clause if the layers do not support their form; "" for a configuration of one scheme."""
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or str(quant_config.get("quant_method", "")).lower() != COMPRESSED_TENSORS:
        return ""
    groups = quant_config.get("config_groups")
    if (
        not isinstance(groups, Mapping)
        or not groups
        or not all(isinstance(group, Mapping) for group in groups.values())
    ):
        return ""
    try:
        by_group = {name: _group_scheme(name, group, quant_config.get("format")) for name, group in groups.items()}
        schemes = with_same_inputs(by_group)
        if quant_config.get("format") != MIXED and len(set(schemes.values())) == 1 and not _is_partial(groups, schemes):
            return ""
        if (refused := _refused(quant_config)) is not None:
            return refused
        return _mixed(quant_config, groups, schemes)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({error})"


def _is_partial(groups: Mapping[str, Any], schemes: Mapping[str, Form | str]) -> bool:
    """Whether only some linear layers have packed integers; the method of these takes all of them for packed."""
    return any(
        isinstance(schemes[name], PackedForm) and list(group.get("targets") or ()) != [LINEAR]
        for name, group in groups.items()
    )


def _refused(quant_config: Mapping[str, Any]) -> str | None:
    if (refused := unsupported_kv_scheme(quant_config)) is not None:
        return refused
    if quant_config.get("transform_config"):
        return "it has a transform_config"
    sparsity = quant_config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        return f"its sparsity_config is {sparsity!r}, not an object"
    form = sparsity.get("format", "dense")
    return None if form == "dense" else f"its weights are sparse, in the format {form}"


def _mixed(
    quant_config: Mapping[str, Any], groups: Mapping[str, Any], schemes: Mapping[str, Form | str]
) -> MixedForm | str:
    excluded, owners = stated_names(quant_config, "ignore"), dict[str, str]()
    scheme_groups = []
    for name, scheme in schemes.items():
        if isinstance(scheme, str):
            return scheme
        targets = stated_names(groups[name], "targets")
        for target in targets:
            if target in owners:
                return f"its {owners[target]} and its {name} both have the target {target!r}"
            if needs_backtracking(target):
                return f"its {name} has the target {target!r}, which needs backtracking to be matched"
            owners[target] = name
        scheme_groups.append(SchemeGroup(name, targets, scheme._replace(excluded=excluded)))
    return MixedForm(tuple(scheme_groups), excluded)


def _group_scheme(name: str, group: Mapping[str, Any], common: Any) -> Form | str:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return f"its {name} has no weights"
    form, is_float = group.get("format") or common, weights.get("type") == "float"
    if form == _NAIVE:
        form = _FLOAT if is_float else _INT
    elif form == MIXED:
        form = _FLOAT if is_float else _INT if group.get("input_activations") else _PACKED
    if form == _PACKED:
        return packed_group(name, group)
    if form == _FLOAT:
        return float_group(name, group)
    if form == _INT:
        return int_group(name, {**group, "format": form})
    return f"its {name} has the format {form}, not {_PACKED}, {_FLOAT} or {_INT}"


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    """As `QuantMethod.detect`: packed integers or NVFP4 in all quantized layers, or groups with different schemes."""
    if (nvfp4 := compressed_nvfp4.detect(folder, config)) is not None:
        return nvfp4
    form = _read(config)
    if form == "":
        return _PACKED_METHOD.detect(folder, config)
    return True if isinstance(form, MixedForm) else form


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `StoredGroups.of`, and as the method of each group."""
    mixed = _read(model.facts.config)
    if not isinstance(mixed, MixedForm):
        assert _PACKED_METHOD.schemes is not None
        return _PACKED_METHOD.schemes(model)
    stored = StoredGroups(model, mixed)
    of_form = {group.scheme: _schemes(model, group.scheme) for group in mixed.groups}

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Scheme | None:
        if embedding:
            fp8_weights.check_embedding(model, names[0])
        group = None if embedding else stored.of(names)
        return None if group is None else of_form[group.scheme](names, inputs, False)

    return scheme


def _matrix_shape(model: StoredModel, layer: str) -> tuple[int, int] | None:
    mixed = _read(model.facts.config)
    if not isinstance(mixed, MixedForm):
        assert _PACKED_METHOD.matrix_shape is not None
        return _PACKED_METHOD.matrix_shape(model, layer)
    group = StoredGroups(model, mixed).of_layer(layer)
    if group is not None and isinstance(group.scheme, PackedForm):
        return packed_integers.matrix_shape(model, group.scheme, layer)
    return shape_of_bytes(model, layer)


def _schemes(model: StoredModel, form: Form) -> LayerSchemes:
    match form:
        case PackedForm():
            return packed_integers.schemes(model, form)
        case Fp8Form():
            return fp8_weights.schemes(model, form)
    return int8_weights.schemes(model, form)


def _of_form(model: ModelFacts) -> QuantMethod:
    """The facts of packed integers, of NVFP4, or of groups of layers with different schemes."""
    if isinstance(compressed_nvfp4.read(model.config), NvFp4Form):
        return compressed_nvfp4.METHOD._replace(detect=detect, stored=stored)
    mixed = _read(model.config)
    if not isinstance(mixed, MixedForm):
        return METHOD
    kinds = list(dict.fromkeys(type(group.scheme) for group in mixed.groups))
    return METHOD._replace(
        storage="srv.quantization.formats.compressed_tensors_storage:MixedStorageFormat",
        ops=tuple(dict.fromkeys(group.scheme.held.op for group in mixed.groups)),
        note=fp8_weights.NOTE if Fp8Form in kinds else "",
        fp8_inputs=any(isinstance(group.scheme, Fp8Form) and group.scheme.inputs for group in mixed.groups),
        turns_inputs=kinds == [PackedForm],
        row_tensors=("weight", SCALE, *int8_weights.STATIC_ROWS),
        row_block=_row_block,
    )


def _row_block(model: ModelFacts) -> int:
    """The largest one of all groups."""
    mixed = mixed_form(model.path, model.config)
    blocks = [group.scheme.block for group in mixed.groups if isinstance(group.scheme, Fp8Form)]
    return max((block[0] for block in blocks if block is not None), default=1)


def read_packed(quant_config: Mapping[str, Any]) -> PackedForm | str:
    """The form of a configuration whose layers all have packed integers; "" for others, and a clause likewise."""
    groups = quant_config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    if others := [name for name, group in groups.items() if not isinstance(group, Mapping)]:
        return f"its {others[0]} is {groups[others[0]]!r}, not an object"
    forms = {str(group.get("format") or quant_config.get("format")) for group in groups.values()}
    if forms != {_PACKED}:
        return ""
    if (refused := unsupported_kv_scheme(quant_config)) is not None:
        return refused
    if quant_config.get("transform_config"):
        return "it has a transform_config"
    schemes = {packed_group(name, group) for name, group in groups.items()}
    if len(schemes) > 1:
        return "its groups of layers are quantized differently"
    (scheme,) = schemes
    return scheme if isinstance(scheme, str) else scheme._replace(excluded=stated_names(quant_config, "ignore"))


def packed_group(name: str, group: Mapping[str, Any]) -> PackedForm | str:
    """The scheme of one group of layers; a clause if the layers do not support its form."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return f"its {name} has no weights"
    if group.get("input_activations") or group.get("output_activations"):
        return f"its {name} quantizes activations as well"
    bits, symmetric = weights.get("num_bits"), bool(weights.get("symmetric", True))
    if weights.get("type", "int") != "int" or bits not in (4, 8):
        return f"its {name} has weights of {bits} bits of type {weights.get('type')}, not integers of 4 or 8 bits"
    strategy = weights.get("strategy") or ("group" if (weights.get("group_size") or 0) > 0 else "channel")
    if strategy not in ("group", "channel"):
        return f"its {name} has scales per {strategy}, not per group or channel"
    if bits == 8 and not symmetric:
        return f"its {name} has 8-bit integers with zero points"
    group_size = int(weights.get("group_size") or 0) if strategy == "group" else 0
    ordered = weights.get("actorder") in (True, "group", "dynamic")
    return grouped(PackedForm("rows", bits, max(0, group_size), symmetric, ordered))


def read_float(config: Mapping[str, Any]) -> Fp8Form | str | None:
    """The form of a checkpoint whose layers are all in FP8; a clause if layers do not support it; None for others."""
    quant_config = config.get("quantization_config")
    if not isinstance(quant_config, Mapping) or str(quant_config.get("quant_method", "")).lower() != COMPRESSED_TENSORS:
        return None
    if not _is_float(quant_config):
        return None
    try:
        return _read_float(quant_config)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({type(error).__name__}: {error})"


def _is_float(quant_config: Mapping[str, Any]) -> bool:
    """Whether a configuration of compressed-tensors states FP8 weights, whatever else it does."""
    groups = quant_config.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    forms = {str(group.get("format") or quant_config.get("format")) for group in groups}
    weights = [group.get("weights") for group in groups]
    kinds = {str(weight.get("type")) if isinstance(weight, Mapping) else "" for weight in weights}
    return forms == {_FLOAT_FORMATS[0]} or (forms == {_FLOAT_FORMATS[1]} and kinds == {"float"})


def _read_float(quant_config: Mapping[str, Any]) -> Fp8Form | str:
    if quant_config.get("transform_config"):
        return "it has a transform_config"
    if (refused := unsupported_kv_scheme(quant_config)) is not None:
        return refused
    sparsity = quant_config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        return f"its sparsity_config is {sparsity!r}, not an object"
    if sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {sparsity['format']}"
    groups = {name: float_group(name, group) for name, group in quant_config["config_groups"].items()}
    schemes = set(with_same_inputs(groups).values())
    if len(schemes) > 1:
        return "its groups of layers are quantized differently"
    (scheme,) = schemes
    return scheme if isinstance(scheme, str) else scheme._replace(excluded=stated_names(quant_config, "ignore"))


def with_same_inputs(groups: Mapping[str, AnyForm]) -> dict[str, AnyForm]:
    """Groups of layers that state quantized inputs only if all those in FP8 do: products are chosen for all layers."""
    inputs = all(group.inputs for group in groups.values() if isinstance(group, Fp8Form))
    return {
        name: group._replace(inputs=inputs) if isinstance(group, Fp8Form) else group for name, group in groups.items()
    }


def float_group(name: str, group: Mapping[str, Any]) -> Fp8Form | str:
    """The scheme of one group of layers; a clause if the layers do not support its form."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return f"its {name} has no weights"
    if group.get("output_activations"):
        return f"its {name} quantizes the outputs of layers as well (output_activations)"
    if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        return f"its {name} has weights of {weights.get('num_bits')} bits of type {weights.get('type')}, not FP8"
    if not weights.get("symmetric", True):
        return f"its {name} has weights with zero points"
    inputs = group.get("input_activations") or {}
    if not isinstance(inputs, Mapping):
        return f"its {name} has the input_activations {inputs!r}, which are not an object"
    if inputs and inputs.get("type") != "float":
        return f"its {name} quantizes activations to type {inputs.get('type')}, not float"
    scheme = Fp8Form(head=True, inputs=inputs.get("num_bits") == 8)
    match weights.get("strategy") or "tensor":
        case "tensor" | "channel":
            return scheme
        case "block":
            return with_block(scheme, weights.get("block_structure") or [128, 128])
        case other:
            return f"its {name} has scales per {other}, not per tensor, channel or block"


def read_int(quant_config: Mapping[str, Any], other_formats: tuple[str, ...]) -> Int8Form | str:
    """The scheme of a `quantization_config`, or the first reason why it is not one of int8.

    `other_formats`: those of other methods, which the reason names.
    """
    if quant_config.get("format") not in (_INT, _NAIVE):
        return f"its format is {quant_config.get('format')}, not {', '.join(other_formats)} or {_INT}"
    if (refused := unsupported_kv_scheme(quant_config)) is not None:
        return refused
    if quant_config.get("transform_config"):
        return "it has a transform_config"
    sparsity = quant_config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"its weights are sparse, in the format {sparsity['format']}"
    groups = quant_config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    if (refused := unsupported_names(quant_config)) is not None:
        return refused
    first, *others = dict.fromkeys(int_group(name, group) for name, group in groups.items())
    if others:
        reasons = (other for other in (first, *others) if isinstance(other, str))
        return next(reasons, "its groups of layers are quantized differently")
    return first if isinstance(first, str) else first._replace(excluded=stated_names(quant_config, "ignore"))


def unsupported_names(quant_config: Mapping[str, Any]) -> str | None:
    try:
        stated_names(quant_config, "ignore")
    except ValueError as error:
        return f"its {error}"
    return None


def int_group(name: str, group: Any) -> Int8Form | str:
    """The scheme of one group of layers; a clause if the layers do not support its form."""
    if not isinstance(group, Mapping):
        return f"its {name} is {group!r}, not an object"
    if group.get("output_activations"):
        return f"its {name} quantizes the outputs of layers as well (output_activations)"
    if group.get("format") not in (None, _INT, _NAIVE):
        return f"its {name} has the format {group['format']}, not {_INT}"
    weights, inputs = group.get("weights"), group.get("input_activations") or None
    if not isinstance(weights, Mapping):
        return f"its {name} has no weights"
    if (refused := _refused_field(name, "weights", weights, _INT8_WEIGHTS)) is not None or inputs is None:
        return refused or Int8Form("none")
    if not isinstance(inputs, Mapping):
        return f"its {name} has the input_activations {inputs!r}, which are not an object"
    dynamic = inputs.get("dynamic") is True
    refused = _refused_field(name, "input_activations", inputs, _DYNAMIC_INPUTS if dynamic else _STATIC_INPUTS)
    return refused or Int8Form("dynamic" if dynamic else "static")


def _refused_field(
    name: str, section: str, fields: Mapping[str, Any], required: Mapping[str, tuple[Any, ...]]
) -> str | None:
    for key, values in required.items():
        if fields.get(key) not in values:
            allowed = " or ".join(str(value) for value in values if value is not None)
            return f"its {name} has {section} with {key} {fields.get(key)}, not {allowed or None}"
    return None


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: each group of layers has a layout, and all other layers stay as they are.

    A layer belongs to the group that names it, else to that of a pattern, else to that of all linear layers.
    """
    if unsupported_kv_scheme(config) or (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnknownStorage("its quantized cache or sparsity is not known")
    ignored, layouts = names_of(config, "ignore"), dict[str, Layout]()
    for group in (config.get("config_groups") or {}).values():
        layout = _layout(group, group.get("format") or config.get("format"), dtype)
        layouts |= dict.fromkeys(names_of(group, "targets"), layout)

    def counts(matrix: StoredMatrix) -> Mapping[str, int] | None:
        target = None if is_named(matrix.name, ignored) else target_of(layouts, matrix.name, LINEAR)
        return None if target is None else layouts[target](matrix.outputs, matrix.inputs)

    return counts


def _own_form(group: Mapping[str, Any]) -> str:
    """The format of one group of a checkpoint with several."""
    if group["weights"].get("type") == "float":
        return _FLOAT
    return _INT if group.get("input_activations") else _PACKED


def _layout(group: Mapping[str, Any], form: str | None, dtype: str) -> Layout:
    """One scheme of compressed-tensors. Its scales have the dtype of the model."""
    weights, inputs_scheme = group["weights"], group.get("input_activations")
    static = 1 if inputs_scheme and inputs_scheme.get("dynamic") is False else 0
    size, bits = weights.get("group_size") or 0, weights["num_bits"]
    strategy = weights.get("strategy") or ("tensor" if size == 0 else "group" if size > 0 else "channel")
    symmetric, block = weights.get("symmetric", True), Fp8Form()
    if strategy == "block":
        block_or_reason = with_block(block, weights.get("block_structure") or [128, 128])
        if isinstance(block_or_reason, str):
            raise UnknownStorage(block_or_reason)
        block = block_or_reason
    ordered = weights.get("actorder") not in (None, False, "static", "weight")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise UnknownStorage(f"quantization of strategy {strategy} is not known")

    def scales(outputs: int, inputs: int) -> tuple[int, int]:
        match strategy:
            case "tensor":
                return 1, 1
            case "channel":
                return outputs, 1
            case "block":
                return block.held.scale_shape(outputs, inputs)
        return outputs, ceil(inputs, size)

    def plain(outputs: int, inputs: int) -> dict[str, int]:
        """One byte per value, with zeros of the same width."""
        rows, columns = scales(outputs, inputs)
        item = "int8" if weights["type"] == "int" else "float8_e4m3fn"
        zeros = 0 if symmetric else rows * columns
        return {item: outputs * inputs + zeros, dtype: rows * columns + static}

    def packed(outputs: int, inputs: int) -> dict[str, int]:
        """Words of 32 bits with several values of a row; zeros are packed along the rows. The shape is stored."""
        rows, columns = scales(outputs, inputs)
        per_word = 32 // bits
        zeros = 0 if symmetric else ceil(rows, per_word) * columns
        words = outputs * ceil(inputs, per_word) + zeros + (inputs if ordered else 0)
        return {"int32": words, dtype: rows * columns + static, "int64": 2}

    def nvfp4(outputs: int, inputs: int) -> dict[str, int]:
        """Two values per byte, an FP8 scale per group, and a scale of the whole weight and of its inputs."""
        whole = 2 if inputs_scheme else 1
        return {"uint8": outputs * inputs // 2, "float8_e4m3fn": outputs * ceil(inputs, size), "float32": whole}

    def mxfp4(outputs: int, inputs: int) -> dict[str, int]:
        """Two values per byte, and a power of two in a byte per group."""
        return {"uint8": outputs * inputs // 2 + outputs * ceil(inputs, size)}

    match _own_form(group) if form == MIXED else form:
        case "int-quantized" | "float-quantized" | "naive-quantized" if bits == 8:
            return plain
        case "pack-quantized" if bits in (4, 8):
            return packed
        case "nvfp4-pack-quantized" if bits == 4 and size > 0:
            return nvfp4
        case "mxfp4-pack-quantized" if bits == 4 and size > 0:
            return mxfp4
    raise UnknownStorage(f"weights of {bits} bits in the format {form} are not known")


_PACKED_METHOD = packed_integers.method(
    COMPRESSED_TENSORS,
    read_packed,
    "srv.quantization.formats.compressed_tensors_storage:PackedGroupsStorageFormat",
)
METHOD = _PACKED_METHOD._replace(
    detect=detect, schemes=schemes, matrix_shape=_matrix_shape, stored=stored, of_form=_of_form
)

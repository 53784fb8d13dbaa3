"""Checkpoints of compressed-tensors whose layers have different schemes: which layer has which. Torch-free.

Owns the groups of a configuration (`config_groups`), their targets, and what layers that are computed together must
share. Must not know how a scheme stores its weights: `srv.quantization.formats.packed`, `fp8` and `w8a8_int8` do.

    format of a group                   weights                      op of its layers
    pack-quantized                      integers of 4 or 8 bits      linear_gguf
    float-quantized, naive-quantized    float8_e4m3fn                linear_fp8
    int-quantized, naive-quantized      int8                         linear_w8a8, linear_w8a8_static, linear_int8

The format is that of the group or, if it states none, that of the configuration. In `mixed-precision`, a group without
one has that of its weights (docs/adr/0080-mixed-schemes.md).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.models.layers.moe_config import expert_names
from srv.quantization.formats import fp8, fp8_configs, int8_configs, packed, w8a8_int8
from srv.quantization.formats.fp8_configs import COMPRESSED_TENSORS, Fp8Form
from srv.quantization.formats.int8_configs import Int8Form
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import matched_target, needs_backtracking, stated_names
from srv.quantization.formats.packed import LINEAR, REMEDY, PackedForm
from srv.quantization.formats.stored_counts import Layout, ceil, is_named, names_of, target_of
from srv.quantization.method import (
    DOWNLOAD_REMEDY,
    QuantMethod,
    StoredCounts,
    StoredMatrix,
    StoredModel,
    UnknownStorage,
)
from srv.quantization.schemes import SCALE, LayerSchemes, Scheme

if TYPE_CHECKING:
    from srv.specs import ModelFacts

MIXED = "mixed-precision"  # the format of a configuration whose groups have formats of their own
_PACKED, _FLOAT, _INT, _NAIVE = "pack-quantized", "float-quantized", "int-quantized", "naive-quantized"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+$")
_SCALES = ("weight_scale", "weight_scale_inv")

Form: TypeAlias = PackedForm | Fp8Form | Int8Form
_KINDS: Mapping[type[Form], str] = {PackedForm: "packed integers", Fp8Form: "FP8", Int8Form: "int8"}


class Group(NamedTuple):
    """Layers of one scheme. `name`: as in the configuration. `targets`: names, patterns ("re:...") and classes."""

    name: str
    targets: tuple[str, ...]
    scheme: Form


class MixedForm(NamedTuple):
    """The groups of a checkpoint, and the layers that are in none of them, as the configuration states them."""

    groups: tuple[Group, ...]
    excluded: tuple[str, ...] = ()

    def targeted(self, names: Sequence[str]) -> Group | None:
        """The group whose target fits a layer best. `names`: that of the layer, and that which its file has for it."""
        by_target = {target: group for group in self.groups for target in group.targets}
        target = matched_target(by_target, names, LINEAR)
        return None if target is None else by_target[target]

    def declared(self, layer: str) -> Group | None:
        """The group of a layer of a checkpoint without weights."""
        declares = fp8_configs.declares(Fp8Form(excluded=self.excluded, head=True), layer)
        return self.targeted((layer,)) if declares else None


class StoredGroups:
    """The group of each layer of a model: its tensors say whether it is quantized, and the configuration how."""

    def __init__(self, model: StoredModel, mixed: MixedForm) -> None:
        self._model, self._mixed = model, mixed
        self._stored = {_layer(name): _layer(stored) for name, stored in model.stored_names.items()}
        self._found: dict[str, Group | None] = {}

    def of_layer(self, layer: str) -> Group | None:
        """None for an unquantized layer.

        Raises ModelError (unsupported_quantization) for one that is stored otherwise than its group states.
        """
        if layer not in self._found:
            self._found[layer] = self._of_layer(layer) if self._model.types else self._mixed.declared(layer)
        return self._found[layer]

    def of(self, names: Sequence[str]) -> Group | None:
        """The group of layers that a linear layer fuses, or of the projections of experts.

        Raises ModelError (unsupported_quantization) if they, or other projections of the same experts, differ.
        """
        experts, shared = _EXPERT.match(names[0]), "of layers that share one input"
        if experts is not None:
            names = (*names, *itertools.chain(*expert_names(experts[1], 1)))
            shared = "of the experts of one layer"
        found = {name: self.of_layer(name) for name in names}
        first = found[names[0]]
        other = next((name for name, each in found.items() if _scheme(each) != _scheme(first)), None)
        if other is not None:
            where = " and ".join(f"{name} is {_described(found[name])}" for name in (names[0], other))
            self._fail(f"{shared}, {where}, and they are computed together")
        return first

    def _of_layer(self, layer: str) -> Group | None:
        kind = _stored_kind(self._model.types, layer)
        stored = self._stored.get(layer)
        group = self._mixed.targeted((layer,) if stored is None else (layer, stored))
        if kind is None:
            self._check_unquantized(layer, group)
            return None
        if group is None:
            self._fail(f"the weights of {layer} are stored as {_KINDS[kind]}, and no group has it as a target")
        if not isinstance(group.scheme, kind):
            stated = _KINDS[type(group.scheme)]
            self._fail(f"the weights of {layer} are stored as {_KINDS[kind]}, and its {group.name} states {stated}")
        return group

    def _check_unquantized(self, layer: str, group: Group | None) -> None:
        """Refuse an unquantized layer that has a scale: its weights are damaged, or missing."""
        types, path = self._model.types, self._model.facts.path
        scale = next((name for each in _SCALES if (name := f"{layer}.{each}") in types), None)
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


def _scheme(group: Group | None) -> Form | None:
    return None if group is None else group.scheme


def _described(group: Group | None) -> str:
    return "not quantized" if group is None else f"of {group.name}"


def _stored_kind(types: Mapping[str, str], layer: str) -> type[Form] | None:
    if f"{layer}.weight_packed" in types:
        return PackedForm
    match types.get(f"{layer}.weight"):
        case fp8.DTYPE:
            return Fp8Form
        case "int8":
            return Int8Form
    return None


def scheme_of(folder: Path | str, config: Mapping[str, Any]) -> MixedForm:
    """The groups of a checkpoint that `detect` recognised. Raises ModelError if its configuration is damaged."""
    found = _read(config)
    if isinstance(found, MixedForm):
        return found
    reason = found or "its quantization_config does not state groups of layers"
    raise ModelError("unsupported_quantization", str(folder), reason, "Use another checkpoint of the model")


def _read(config: Mapping[str, Any]) -> MixedForm | str:
    """The groups; a clause if the layers do not support their form; "" for a configuration of one scheme."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping) or str(stated.get("quant_method", "")).lower() != COMPRESSED_TENSORS:
        return ""
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        return ""
    try:
        found = {name: _group_scheme(name, group, stated.get("format")) for name, group in groups.items()}
        schemes = fp8_configs.with_same_inputs(found)
        if stated.get("format") != MIXED and len(set(schemes.values())) == 1 and not _is_partial(groups, schemes):
            return ""
        if (refused := _refused(stated)) is not None:
            return refused
        return _mixed(stated, groups, schemes)
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({error})"


def _is_partial(groups: Mapping[str, Any], schemes: Mapping[str, Form | str]) -> bool:
    """Whether only some linear layers have packed integers; the method of these takes all of them for packed."""
    return any(
        isinstance(schemes[name], PackedForm) and list(group.get("targets") or ()) != [LINEAR]
        for name, group in groups.items()
    )


def _refused(stated: Mapping[str, Any]) -> str | None:
    if (refused := unsupported_kv_scheme(stated)) is not None:
        return refused
    if stated.get("transform_config"):
        return "it has a transform_config"
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        return f"its sparsity_config is {sparsity!r}, not an object"
    form = sparsity.get("format", "dense")
    return None if form == "dense" else f"its weights are sparse, in the format {form}"


def _mixed(stated: Mapping[str, Any], groups: Mapping[str, Any], schemes: Mapping[str, Form | str]) -> MixedForm | str:
    excluded, owners = stated_names(stated, "ignore"), dict[str, str]()
    found = []
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
        found.append(Group(name, targets, scheme._replace(excluded=excluded)))
    return MixedForm(tuple(found), excluded)


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
        return packed.compressed_group(name, group)
    if form == _FLOAT:
        return fp8_configs.compressed_group(name, group)
    if form == _INT:
        return int8_configs.compressed_group(name, {**group, "format": form})
    return f"its {name} has the format {form}, not {_PACKED}, {_FLOAT} or {_INT}"


def detect(folder: Path, config: Mapping[str, Any]) -> bool | str:
    """As `QuantMethod.detect`: packed integers in all quantized layers, or groups of layers with different schemes."""
    found = _read(config)
    if found == "":
        return packed.COMPRESSED_METHOD.detect(folder, config)
    return True if isinstance(found, MixedForm) else found


def schemes(model: StoredModel) -> LayerSchemes:
    """Raises ModelError as `StoredGroups.of`, and as the method of each group."""
    mixed = _read(model.facts.config)
    if not isinstance(mixed, MixedForm):
        return packed.schemes(model)
    stored = StoredGroups(model, mixed)
    of_form = {group.scheme: _schemes(model, group.scheme) for group in mixed.groups}

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Scheme | None:
        if embedding:
            fp8.check_embedding(model, names[0])
        group = None if embedding else stored.of(names)
        return None if group is None else of_form[group.scheme](names, inputs, False)

    return scheme


def _schemes(model: StoredModel, form: Form) -> LayerSchemes:
    match form:
        case PackedForm():
            return packed.schemes(model, form)
        case Fp8Form():
            return fp8.schemes(model, form)
    return w8a8_int8.schemes(model, form)


def _of_form(model: ModelFacts) -> QuantMethod:
    """The facts of packed integers, or of groups of layers with different schemes."""
    mixed = _read(model.config)
    if not isinstance(mixed, MixedForm):
        return METHOD
    kinds = list(dict.fromkeys(type(group.scheme) for group in mixed.groups))
    return METHOD._replace(
        storage="srv.quantization.formats.compressed_tensors_storage:MixedStorageFormat",
        ops=tuple(dict.fromkeys(group.scheme.held.op for group in mixed.groups)),
        sharding="weights of mixed schemes cannot be sharded yet",
        note=fp8.NOTE if Fp8Form in kinds else "",
        fp8_inputs=any(isinstance(group.scheme, Fp8Form) and group.scheme.inputs for group in mixed.groups),
        turns_inputs=kinds == [PackedForm],
        row_tensors=("weight", SCALE, *w8a8_int8.STATIC_ROWS),
        row_block=_row_block,
    )


def _row_block(model: ModelFacts) -> int:
    """The largest one of all groups."""
    mixed = scheme_of(model.path, model.config)
    blocks = [group.scheme.block for group in mixed.groups if isinstance(group.scheme, Fp8Form)]
    return max((block[0] for block in blocks if block is not None), default=1)


def stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: groups of layers with a layout each; layers of no group, and ignored ones, stay as they are.

    A layer belongs to the group that names it, else to that of a pattern, else to that of all linear layers.
    """
    if unsupported_kv_scheme(config) or (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnknownStorage("its quantized cache or sparsity is not known: no size is claimed")
    ignored, layouts = names_of(config, "ignore"), dict[str, Layout]()
    for group in (config.get("config_groups") or {}).values():
        layout = _layout(group, group.get("format") or config.get("format"), dtype)
        layouts |= dict.fromkeys(names_of(group, "targets"), layout)

    def counts(matrix: StoredMatrix) -> Mapping[str, int] | None:
        target = None if is_named(matrix.name, ignored) else target_of(layouts, matrix.name, LINEAR)
        return None if target is None else layouts[target](matrix.outputs, matrix.inputs)

    return counts


def _layout(group: Mapping[str, Any], form: str | None, dtype: str) -> Layout:
    """One scheme of compressed-tensors. Its scales have the dtype of the model."""
    weights, inputs_scheme = group["weights"], group.get("input_activations")
    static = 1 if inputs_scheme and inputs_scheme.get("dynamic") is False else 0
    strategy, size, bits = weights.get("strategy"), weights.get("group_size") or 0, weights["num_bits"]
    symmetric, block = weights.get("symmetric", True), weights.get("block_structure")
    ordered = weights.get("actorder") not in (None, False, "static", "weight")
    if strategy not in ("tensor", "channel", "group", "block", "tensor_group"):
        raise UnknownStorage(f"quantization of strategy {strategy} is not known: no size is claimed")

    def scales(outputs: int, inputs: int) -> tuple[int, int]:
        match strategy:
            case "tensor":
                return 1, 1
            case "channel":
                return outputs, 1
            case "block":
                return ceil(outputs, block[0]), ceil(inputs, block[1])
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

    match form:
        case "int-quantized" | "float-quantized" | "naive-quantized" if bits == 8:
            return plain
        case "pack-quantized" if bits in (4, 8):
            return packed
        case "nvfp4-pack-quantized":
            return nvfp4
    raise UnknownStorage(f"weights of {bits} bits in the format {form} are not known: no size is claimed")


METHOD = packed.COMPRESSED_METHOD._replace(detect=detect, schemes=schemes, stored=stored, of_form=_of_form)

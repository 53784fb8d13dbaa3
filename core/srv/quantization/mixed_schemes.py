"""Checkpoints of compressed-tensors whose layers have different schemes: which layer has which. Torch-free.

Owns the groups of a configuration (`config_groups`), their targets, and what layers that are computed together must
share. Must not know how a scheme stores its weights: `srv.quantization.packed`, `fp8` and `w8a8_int8` do.

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
from srv.models.checkpoints.safetensors_header import StoredTensor, read_checkpoint
from srv.models.layers.moe_config import expert_names
from srv.quantization import fp8, fp8_configs, int8_configs, packed, w8a8_int8
from srv.quantization.fp8_configs import COMPRESSED_TENSORS, Fp8Scheme
from srv.quantization.int8_configs import Int8Scheme
from srv.quantization.kv_scheme import unsupported_kv_scheme
from srv.quantization.layer_patterns import matched_target, needs_backtracking, stated_names
from srv.quantization.method import (
    DOWNLOAD_REMEDY,
    UP_PROJECTION,
    HeldMatrix,
    LayerOps,
    QuantMethod,
    StoredModel,
    TensorBytes,
    corrections,
)
from srv.quantization.packed import LINEAR, REMEDY, PackedScheme
from srv.quantization.packed_checks import unpacked_shape
from srv.quantization.tensor_bytes import of_blocks, of_rows

if TYPE_CHECKING:
    from srv.specs import ModelFacts

MIXED = "mixed-precision"  # the format of a configuration whose groups have formats of their own
_PACKED, _FLOAT, _INT, _NAIVE = "pack-quantized", "float-quantized", "int-quantized", "naive-quantized"
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.\w+$")
_SCALES = ("weight_scale", "weight_scale_inv")
_ITEM = 4  # bytes of a scale

Scheme: TypeAlias = PackedScheme | Fp8Scheme | Int8Scheme
_KINDS: Mapping[type[Scheme], str] = {PackedScheme: "packed integers", Fp8Scheme: "FP8", Int8Scheme: "int8"}


class Group(NamedTuple):
    """Layers of one scheme. `name`: as in the configuration. `targets`: names, patterns ("re:...") and classes."""

    name: str
    targets: tuple[str, ...]
    scheme: Scheme


class MixedScheme(NamedTuple):
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
        declares = fp8_configs.declares(Fp8Scheme(excluded=self.excluded, head=True), layer)
        return self.targeted((layer,)) if declares else None


class StoredGroups:
    """The group of each layer of a model: its tensors say whether it is quantized, and the configuration how."""

    def __init__(self, model: StoredModel, mixed: MixedScheme) -> None:
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
        packed_weights = group is not None and isinstance(group.scheme, PackedScheme)
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


def _scheme(group: Group | None) -> Scheme | None:
    return None if group is None else group.scheme


def _described(group: Group | None) -> str:
    return "not quantized" if group is None else f"of {group.name}"


def _stored_kind(types: Mapping[str, str], layer: str) -> type[Scheme] | None:
    if f"{layer}.weight_packed" in types:
        return PackedScheme
    match types.get(f"{layer}.weight"):
        case fp8.DTYPE:
            return Fp8Scheme
        case "int8":
            return Int8Scheme
    return None


def scheme_of(folder: Path | str, config: Mapping[str, Any]) -> MixedScheme:
    """The groups of a checkpoint that `detect` recognised. Raises ModelError if its configuration is damaged."""
    found = _read(config)
    if isinstance(found, MixedScheme):
        return found
    reason = found or "its quantization_config does not state groups of layers"
    raise ModelError("unsupported_quantization", str(folder), reason, "Use another checkpoint of the model")


def _read(config: Mapping[str, Any]) -> MixedScheme | str:
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


def _is_partial(groups: Mapping[str, Any], schemes: Mapping[str, Scheme | str]) -> bool:
    """Whether only some linear layers have packed integers; the method of these takes all of them for packed."""
    return any(
        isinstance(schemes[name], PackedScheme) and list(group.get("targets") or ()) != [LINEAR]
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


def _mixed(
    stated: Mapping[str, Any], groups: Mapping[str, Any], schemes: Mapping[str, Scheme | str]
) -> MixedScheme | str:
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
    return MixedScheme(tuple(found), excluded)


def _group_scheme(name: str, group: Mapping[str, Any], common: Any) -> Scheme | str:
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
    return True if isinstance(found, MixedScheme) else found


def layer_ops(model: StoredModel) -> LayerOps:
    mixed = _read(model.facts.config)
    if not isinstance(mixed, MixedScheme):  # the checkpoint is refused
        return lambda names, inputs, rows: ""
    stored, description = StoredGroups(model, mixed), w8a8_int8.read_description(model)

    def op(names: tuple[str, ...], inputs: int, rows: bool) -> str:
        if rows:
            fp8.check_embedding(model, names[0])
            return ""
        group = stored.of(names)
        match group and group.scheme:
            case None:
                return ""
            case PackedScheme() as scheme:
                packed.are_packed(model, scheme, names, inputs)
            case Fp8Scheme() as scheme:
                fp8.are_fp8(model, scheme, names)
            case Int8Scheme() as scheme:
                w8a8_int8.are_int8(model, description, scheme, names, inputs)
        assert group is not None
        return _op(group.scheme)

    return op


def _op(scheme: Scheme) -> str:
    match scheme:
        case PackedScheme():
            return "linear_gguf"
        case Fp8Scheme():
            return "linear_fp8"
    return scheme.op


def tensor_bytes(model: StoredModel) -> TensorBytes:
    stored = StoredGroups(model, scheme_of(model.facts.path, model.facts.config))

    def sizes(matrix: HeldMatrix) -> tuple[int, ...]:
        group = stored.of(matrix.names)
        match group and group.scheme:
            case PackedScheme() as scheme:
                return of_blocks(scheme.block_type, matrix)
            case Fp8Scheme() as scheme:
                return fp8.of_scheme(scheme, matrix)
        return of_rows(matrix)

    return sizes


def held_bytes(scheme: Scheme, outputs: int, inputs: int) -> int:
    """Bytes of a matrix as layers hold it, with its scales."""
    match scheme:
        case PackedScheme():
            return outputs * scheme.row_bytes(inputs) + (inputs * 8 if scheme.ordered else 0)
        case Fp8Scheme():
            return fp8.matrix_bytes(scheme, outputs, inputs)
    return w8a8_int8.held_bytes(scheme, outputs, inputs)


def weight_bytes(model: ModelFacts, item_size: int, projection_params: int) -> int:
    """The matrices of each group as layers hold them, and `item_size` for all other weights.

    Without weights, all linear layers count as those of the group with the largest ones.
    """
    mixed = _read(model.config)
    if not isinstance(mixed, MixedScheme):
        return model.weight_bytes
    checkpoint = read_checkpoint(Path(model.path)) if model.format == "safetensors" else None
    if checkpoint is None:
        rows = projection_params // model.hidden_size
        most = max(held_bytes(group.scheme, rows, model.hidden_size) for group in mixed.groups)
        return most + (model.counted_parameters() - rows * model.hidden_size) * item_size
    held = quantized = 0
    for name, tensor in checkpoint.tensors.items():
        layer, _, suffix = name.rpartition(".")
        size = _size(mixed, layer, suffix, tensor)
        if size is not None:
            outputs, inputs, scheme = size
            held += held_bytes(scheme, outputs, inputs)
            quantized += outputs * inputs
    wide = corrections(checkpoint.tensors)
    return held + wide * _ITEM + (model.counted_parameters() - quantized - wide) * item_size


def _size(mixed: MixedScheme, layer: str, suffix: str, tensor: StoredTensor) -> tuple[int, int, Scheme] | None:
    """The outputs, inputs and scheme of the layer of a quantized matrix; None for others and for dequantized ones."""
    if len(tensor.shape) != 2 or suffix not in ("weight", "weight_packed") or layer.endswith(UP_PROJECTION):
        return None
    kind = _stored_kind({f"{layer}.{suffix}": tensor.dtype}, layer)
    group = None if kind is None else mixed.targeted((layer,))
    if group is None:
        return None
    outputs, inputs = tensor.shape
    if isinstance(group.scheme, PackedScheme):
        outputs, inputs = unpacked_shape(group.scheme.layout, (outputs, inputs), 32 // group.scheme.bits)
    return outputs, inputs, group.scheme


def _of_form(model: ModelFacts) -> QuantMethod:
    """The facts of packed integers, or of groups of layers with different schemes."""
    mixed = _read(model.config)
    if not isinstance(mixed, MixedScheme):
        return METHOD
    kinds = list(dict.fromkeys(type(group.scheme) for group in mixed.groups))
    return METHOD._replace(
        layers="srv.quantization.mixed_layers:MixedLayerFactory",
        storage="srv.quantization.mixed_layers:MixedStorageFormat",
        ops=tuple(dict.fromkeys(_op(group.scheme) for group in mixed.groups)),
        weight_bytes=weight_bytes,
        sharding="weights of mixed schemes cannot be sharded yet",
        layer_ops=layer_ops,
        tensor_bytes=tensor_bytes,
        note=fp8.NOTE if Fp8Scheme in kinds else "",
        fp8_inputs=any(isinstance(group.scheme, Fp8Scheme) and group.scheme.inputs for group in mixed.groups),
        turns_inputs=kinds == [PackedScheme],
        row_tensors=("weight", fp8.SCALE, *w8a8_int8.STATIC_ROWS),
        row_block=_row_block,
    )


def _row_block(model: ModelFacts) -> int:
    """The largest one of all groups."""
    mixed = scheme_of(model.path, model.config)
    blocks = [group.scheme.block for group in mixed.groups if isinstance(group.scheme, Fp8Scheme)]
    return max((block[0] for block in blocks if block is not None), default=1)


METHOD = packed.COMPRESSED_METHOD._replace(detect=detect, of_form=_of_form)

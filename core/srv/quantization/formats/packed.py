"""Checkpoints with integers of 4 or 8 bits that are packed into words: AWQ, GPTQ and compressed-tensors. Torch-free.

Owns the configurations, which layers are quantized, what headers must show of them, and in which blocks the layers hold
them. Weights are repacked at load into the quantization blocks of GGUF files, so that every platform computes with the
products that it has for these (`linear_gguf`, `experts_gguf`), and never through a copy in floats
(docs/adr/0070-packed-integers.md). Must not know how words are packed: `srv.quantization.formats.packed_words` does.

    method               tensors of a linear layer [N, K], with groups of g inputs
    awq                  qweight, qzeros, scales                          zeros as they are, also if all are 8
    gptq                 qweight, qzeros, scales, g_idx                   zeros less 1, except in the format gptq_v2
    compressed-tensors   weight_packed, weight_scale, weight_shape        [weight_zero_point, weight_g_idx]

The up-projection of latent attention, which is no linear layer here, is dequantized at load.

    w = scale * (q - zero)    4 bits: Q4_0 if the zero is 8, else Q4_1    8 bits: Q8_0, whose zero is 128

(Formats: the source code of AutoAWQ, GPTQModel and compressed-tensors)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from srv.dtypes import FLOATS
from srv.errors import ModelError
from srv.quantization.formats.kv_scheme import unsupported_kv_scheme
from srv.quantization.formats.layer_patterns import REGEX, check_pattern, names_layer, stated_names
from srv.quantization.formats.stored_counts import bits_of, ceil, group_size, names_of, one_layout
from srv.quantization.method import (
    DOWNLOAD_REMEDY,
    UP_PROJECTION,
    QuantMethod,
    StoredCounts,
    StoredModel,
    UnknownStorage,
)
from srv.quantization.schemes import Blocks, LayerSchemes

Layout: TypeAlias = Literal["awq", "gptq", "rows"]
BLOCK = 32  # weights in one of the blocks that layers hold
SCALES = ("scales", "weight_scale")
_INDICES = ("g_idx", "weight_g_idx", "weight_shape")  # integers that are not packed
AWQ, GPTQ, COMPRESSED = "awq", "gptq", "compressed-tensors"
REMEDY = "Use another checkpoint of the model, or a GGUF file"
_LM_HEAD = "lm_head"
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})  # which tools leave as they are
LINEAR = "Linear"  # the class of all linear layers, as a target of compressed-tensors
_FORMAT = "pack-quantized"  # of compressed-tensors
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
    in words in the order that kernels of AWQ want.
    """

    layout: Layout
    bits: int
    group: int
    symmetric: bool
    ordered: bool = False
    zero_offset: int = 0
    excluded: tuple[str, ...] = ()
    interleaved: bool = False

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
            return names
        return (*names[:3], *(names[3:4] if not self.symmetric else ()), *(names[4:] if self.ordered else ()))


def scheme_of(folder: Path | str, config: Mapping[str, Any]) -> PackedForm:
    """The scheme of a checkpoint that `detect` recognised. Raises ModelError if its configuration is damaged."""
    found = _read(_stated(config))
    if isinstance(found, PackedForm):
        return found
    reason = found or "its quantization_config is not that of packed integers"
    raise ModelError("unsupported_quantization", str(folder), reason, "Use another checkpoint of the model")


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = config.get("quantization_config")
    return stated if isinstance(stated, Mapping) else {}


def _read(stated: Mapping[str, Any]) -> PackedForm | str:
    """The scheme; a clause if the layers do not support its form; "" if it is of another method."""
    method = str(stated.get("quant_method", "")).lower()
    try:
        match method:
            case "awq":
                return _read_awq(stated)
            case "gptq":
                return _read_gptq(stated)
            case "compressed-tensors":
                return _read_compressed(stated)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"its quantization_config has an invalid value ({error})"
    return ""


def _detect(method: str, folder: Path, config: Mapping[str, Any]) -> bool | str:
    stated = _stated(config)
    if str(stated.get("quant_method", "")).lower() != method:
        return False
    found = _read(stated)
    if isinstance(found, PackedForm):
        return True
    return found or False


def _read_awq(stated: Mapping[str, Any]) -> PackedForm | str:
    bits, version = _first(stated, "bits", "w_bit"), str(_first(stated, "version", "format") or "gemm").lower()
    if bits not in (4, 8):
        return f"its integers have {bits} bits, not 4 or 8"
    if version != "gemm" or str(stated.get("backend", "autoawq")).lower() != "autoawq":
        return f"it is packed for the kernels {version}, not as AutoAWQ's gemm"
    symmetric = not _first(stated, "zero_point", default=True)  # GPTQModel's; its zeros of 8 or 128 are stored
    if bits == 8 and not symmetric:
        return "its 8-bit integers have zero points other than 128 (zero_point is true)"
    interleaved = bits == 4 or not _is_of_gptqmodel(stated)
    excluded = _excluded(stated)
    return _grouped(PackedForm("awq", bits, _group(stated), symmetric, excluded=excluded, interleaved=interleaved))


def _is_of_gptqmodel(stated: Mapping[str, Any]) -> bool:
    """Whether GPTQModel wrote a checkpoint: it packs 8-bit integers of AWQ as they come, and 4-bit ones in turn.

    The kernels that other servers have for AWQ read both in turn.
    """
    meta = stated.get("meta")
    made_by = meta.get("quantizer") if isinstance(meta, Mapping) else None
    names = made_by if isinstance(made_by, list) else [made_by]
    return any(str(name).lower().startswith("gptqmodel") for name in names)


def _read_gptq(stated: Mapping[str, Any]) -> PackedForm | str:
    bits, form = _first(stated, "bits"), str(_first(stated, "checkpoint_format", "format") or "gptq").lower()
    symmetric = bool(_first(stated, "sym", default=True))
    if bits not in (4, 8):
        return f"its integers have {bits} bits, not 4 or 8"
    if form not in ("gptq", "gptq_v2"):
        return f"it is packed for the kernels {form}"
    if stated.get("pack_dtype") not in (None, "int32"):
        return f"it is packed in words of {stated['pack_dtype']}, not int32"
    rules = stated.get("dynamic") or {}
    if other := [rule for rule in rules if not rule.startswith("-:")]:
        return f"its layers are quantized differently (dynamic has a rule for {other[0]!r})"
    if bits == 8 and not symmetric:
        return "its 8-bit integers have zero points other than 128 (sym is false)"
    left_out = tuple(f"{REGEX}{rule.removeprefix('-:')}" for rule in rules)
    for pattern in left_out:
        check_pattern("dynamic", pattern)
    excluded = (*left_out, *_excluded(stated))
    group = _group(stated)
    ordered, offset = bool(stated.get("desc_act")) and group > 0, int(form == "gptq")
    return _grouped(PackedForm("gptq", bits, group, symmetric, ordered, offset, excluded))


def _read_compressed(stated: Mapping[str, Any]) -> PackedForm | str:
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "it has no config_groups"
    if others := [name for name, group in groups.items() if not isinstance(group, Mapping)]:
        return f"its {others[0]} is {groups[others[0]]!r}, not an object"
    forms = {str(group.get("format") or stated.get("format")) for group in groups.values()}
    if forms != {_FORMAT}:
        return ""
    if (refused := unsupported_kv_scheme(stated)) is not None:
        return refused
    if stated.get("transform_config"):
        return "it has a transform_config"
    schemes = {compressed_group(name, group) for name, group in groups.items()}
    if len(schemes) > 1:  # `srv.quantization.formats.compressed_tensors` serves them
        return "its groups of layers are quantized differently"
    (scheme,) = schemes
    return scheme if isinstance(scheme, str) else scheme._replace(excluded=stated_names(stated, "ignore"))


def compressed_group(name: str, group: Mapping[str, Any]) -> PackedForm | str:
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
    return _grouped(PackedForm("rows", bits, max(0, group_size), symmetric, ordered))


def _grouped(scheme: PackedForm) -> PackedForm | str:
    if scheme.group % BLOCK:
        return f"its groups have {scheme.group} inputs, not a multiple of {BLOCK}"
    return scheme


def _first(stated: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    value = next((stated[name] for name in names if stated.get(name) is not None), default)
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _group(stated: Mapping[str, Any]) -> int:
    """Inputs per scale; -1, 0 and None all say that there is one scale for all inputs."""
    return max(0, int(_first(stated, "group_size", "q_group_size", default=0)))


def _excluded(stated: Mapping[str, Any]) -> tuple[str, ...]:
    excluded = stated_names(stated, "modules_to_not_convert")
    return excluded if stated.get("lm_head") else (*excluded, _LM_HEAD)


def check_tensors(
    model: StoredModel, scheme: PackedForm, layer: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int]:
    """The sizes of a quantized layer, by the shapes of its tensors, which their suffixes name.

    Raises ModelError if tensors are missing, left over, or have other shapes or dtypes; and unsupported_quantization
    for rows that cannot be blocks.
    """

    def fail(code: str, reason: str) -> NoReturn:
        raise ModelError(code, model.facts.path, reason, DOWNLOAD_REMEDY)

    if missing := [suffix for suffix in scheme.suffixes if suffix not in shapes]:
        fail("missing_tensors", f"it lacks {layer}.{missing[0]}")
    if extra := [suffix for suffix in shapes if suffix not in scheme.suffixes]:
        fail("unexpected_tensors", f"it has {layer}.{extra[0]}, which its quantization_config does not state")
    for suffix in shapes:
        wanted = FLOATS if suffix in SCALES else ("int32", "int64") if suffix in _INDICES else ("int32",)
        if (dtype := model.types.get(f"{layer}.{suffix}", wanted[0])) not in wanted:
            fail("dtype_mismatch", f"{layer}.{suffix} is stored as {dtype}, not as {' or '.join(wanted)}")
    first = shapes[scheme.suffixes[0]]
    if len(first) != 2:
        fail("shape_mismatch", f"{layer}.{scheme.suffixes[0]} has the shape {list(first)}, not two axes")
    outputs, inputs = unpacked_shape(scheme.layout, first, 32 // scheme.bits)
    if (unfit := unfit_inputs(scheme, inputs, layer)) is not None:
        fail("unsupported_quantization", unfit)
    expected = _tensor_shapes(scheme, outputs, inputs)
    for suffix, shape in shapes.items():
        if shape != expected.get(suffix, shape):
            reason = f"{layer}.{suffix} has the shape {list(shape)}, but {list(expected[suffix])} fits its weights"
            fail("shape_mismatch", f"{reason} and groups of {scheme.group or inputs} inputs")
    return outputs, inputs


def _tensor_shapes(scheme: PackedForm, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors beside the packed integers."""
    groups = -(-inputs // scheme.group) if scheme.group else 1
    words = -(-outputs // (32 // scheme.bits))
    return {
        "scales": (groups, outputs),
        "qzeros": (groups, words),
        "g_idx": (inputs,),
        "weight_scale": (outputs, groups),
        "weight_zero_point": (words, groups),
        "weight_g_idx": (inputs,),
        "weight_shape": (2,),
    }


def unfit_inputs(scheme: PackedForm, inputs: int, layer: str) -> str | None:
    """The clause that says why rows of a layer cannot be blocks; None if they can."""
    if inputs % BLOCK or (scheme.group and inputs % scheme.group):
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


def is_packed(scheme: PackedForm, types: Mapping[str, str], name: str) -> bool:
    """Whether a linear layer is quantized: its tensors say so; without weights, the configuration does."""
    if types:
        return f"{name}.{scheme.suffixes[0]}" in types
    return _ROUTERS.isdisjoint(name.split(".")) and not any(names_layer(pattern, name) for pattern in scheme.excluded)


def are_packed(model: StoredModel, scheme: PackedForm, names: Sequence[str], inputs: int) -> bool:
    """Whether layers that share one input are quantized: those that a linear layer fuses, or projections of experts.

    Raises ModelError: unsupported_quantization for those that layers cannot hold as blocks; missing_tensors,
    unexpected_tensors, dtype_mismatch and shape_mismatch for damaged ones.
    """
    packed = {name: is_packed(scheme, model.types, name) for name in names}
    for name in names if model.types else ():
        _check_stored(model, scheme, name)
    if not any(packed.values()):
        return False
    reason = unfit_inputs(scheme, inputs, names[0])
    if not all(packed.values()):
        quantized, plain = (next(name for name, each in packed.items() if each is kind) for kind in (True, False))
        reason = f"of layers that share one input, {quantized} is quantized and {plain} is not"
    if reason is not None:
        raise ModelError("unsupported_quantization", model.facts.path, reason, REMEDY)
    return True


def _check_stored(model: StoredModel, scheme: PackedForm, name: str) -> None:
    """Check the tensors of a layer, if it has any that unquantized layers do not have."""
    stored = [suffix for suffix in SUFFIXES[scheme.layout] if f"{name}.{suffix}" in model.types]
    plain = f"{name}.weight" in model.types
    if scheme.suffixes[0] in stored and plain:
        reason = f"it has both {name}.{scheme.suffixes[0]} and {name}.weight"
        raise ModelError("unexpected_tensors", model.facts.path, reason, DOWNLOAD_REMEDY)
    if stored and not plain:
        check_tensors(model, scheme, name, {suffix: model.shapes[f"{name}.{suffix}"] for suffix in stored})


def check_dequantized(model: StoredModel, scheme: PackedForm) -> None:
    """Raises ModelError, as `are_packed`, for damaged weights that are dequantized at load."""
    layers = {name.rpartition(".")[0] for name in model.types}
    for layer in sorted(layer for layer in layers if layer.endswith(UP_PROJECTION)):
        _check_stored(model, scheme, layer)


def schemes(model: StoredModel, form: PackedForm | None = None) -> LayerSchemes:
    """`form`: None for the one that the configuration of the checkpoint states. Raises ModelError as `are_packed`."""
    if form is None and _read(_stated(model.facts.config)) == "":  # the value of --quantization is refused
        return lambda names, inputs, embedding: None
    stored = form or scheme_of(model.facts.path, model.facts.config)
    held = stored.held
    check_dequantized(model, stored)

    def scheme(names: tuple[str, ...], inputs: int, embedding: bool) -> Blocks | None:
        return None if embedding or not are_packed(model, stored, names, inputs) else held

    return scheme


def _awq_stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: packed along the outputs, with scales and zeros per group of inputs (AutoAWQ's gemm)."""
    if config.get("version", "gemm").lower() != "gemm":
        raise UnknownStorage(f"AWQ weights of version {config['version']} are not known: no size is claimed")
    per_word, size = 32 // bits_of(config, "bits", "w_bit"), group_size(config, "group_size", "q_group_size")
    zeros = 1 if config.get("zero_point", True) else 0

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        groups = ceil(inputs, size) if size else 1
        return {"int32": (inputs + groups * zeros) * (outputs // per_word), "float16": groups * outputs}

    return one_layout(layout, names_of(config, "modules_to_not_convert"))


def _gptq_stored(config: Mapping[str, Any], dtype: str) -> StoredCounts:
    """As `QuantMethod.stored`: packed along the inputs, with scales, zeros and the group of each input (GPTQModel)."""
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        raise UnknownStorage(f"GPTQ weights of format {config['checkpoint_format']} are not known: no size is claimed")
    per_word, size = 32 // bits_of(config, "bits"), group_size(config, "group_size")
    rules = config.get("dynamic") or {}
    if any(not rule.startswith("-:") for rule in rules) or config.get("modules_in_block_to_quantize"):
        raise UnknownStorage("its modules are quantized differently from one another: no size is claimed")
    excluded = [f"{REGEX}{rule.removeprefix('-:')}" for rule in rules] + names_of(config, "modules_to_not_convert")

    def layout(outputs: int, inputs: int) -> dict[str, int]:
        groups = ceil(inputs, size) if size else 1
        packed = inputs // per_word * outputs + groups * (outputs // per_word)
        return {"int32": packed + inputs, "float16": groups * outputs}

    return one_layout(layout, excluded, head=bool(config.get("lm_head")))


def _method(name: str) -> QuantMethod:
    return QuantMethod(
        name=name,
        storage="srv.quantization.formats.packed_storage:PackedStorageFormat",
        ops=("linear_gguf",),
        detect=lambda folder, config: _detect(name, folder, config),
        sharding="weights of packed integers cannot be sharded yet",
        schemes=schemes,
        packed=True,
        turns_inputs=True,
        row_tensors=("weight",),
        up_projections=True,
    )


AWQ_METHOD = _method(AWQ)._replace(stored=_awq_stored)
GPTQ_METHOD = _method(GPTQ)._replace(stored=_gptq_stored)
COMPRESSED_METHOD = _method(COMPRESSED)

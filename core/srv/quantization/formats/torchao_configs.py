"""How configurations of torchao state the form of quantized weights. Torch-free.

One configuration is for all linear layers, or there is one for each name or pattern (`FqnToConfig`): all of these must
be alike, since which layers are quantized follows from the stored tensors. Must not know what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from srv.models.checkpoints.gguf_types import TYPES_BY_NAME
from srv.quantization.formats.fp8_configs import Fp8Form
from srv.quantization.formats.layer_patterns import REGEX, check_pattern, names_layer, stated_names
from srv.quantization.schemes import Blocks, Inputs, Int8, Scheme

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


def read_form(stated: Mapping[str, Any]) -> Form:
    """The form of the quantized layers. Raises ValueError with a clause for configurations that they do not support."""
    found = stated.get("quant_type")
    if not isinstance(found, Mapping):
        return _form(stated, found, stated.get("quant_type_kwargs"))
    if others := sorted(found.keys() - {"default"}):
        raise ValueError(f"its layers are quantized differently (quant_type has {others[0]!r})")
    forms: dict[Form, str] = {}
    for name, each in _by_layer(found.get("default")).items():
        kind, fields = (each.get("_type"), each.get("_data")) if isinstance(each, Mapping) else (each, {})
        forms.setdefault(_form(stated, kind, fields), name)
    if len(forms) != 1:
        differ = " and ".join(map(repr, list(forms.values())[:2]))
        raise ValueError(f"its layers are quantized differently ({differ})" if forms else "it quantizes no layer")
    return next(iter(forms))


def _by_layer(stated: Any) -> Mapping[str, Any]:
    """The configurations of layers by their names or patterns, without those that stay as they are."""
    return {name: each for name, each in _stated_by_layer(stated).items() if each is not None}


def _stated_by_layer(stated: Any) -> Mapping[str, Any]:
    if not isinstance(stated, Mapping) or str(stated.get("_type")) not in _BY_NAME:
        return {"_default": stated}
    fields = stated.get("_data")
    named = next((fields[each] for each in _FIELDS if fields.get(each)), None) if isinstance(fields, Mapping) else None
    if not isinstance(named, Mapping):
        raise ValueError(f"its {stated['_type']} has no {_FIELDS[0]}")
    for name in named:
        if str(name).startswith(REGEX):
            check_pattern(_FIELDS[0], str(name))
    return {str(name): each for name, each in named.items()}


def declares(stated: Mapping[str, Any], layer: str) -> bool:
    """Whether a configuration without weights says that a layer is quantized. Raises ValueError like `read_form`."""
    if any(names_layer(each, layer) for each in _excluded(stated)):
        return False
    found = stated.get("quant_type")
    named = _stated_by_layer(found.get("default") if isinstance(found, Mapping) else found)
    patterns = (name for name in named if name.startswith(REGEX) and _matches(name, layer))
    key = next((name for name in (layer, f"{layer}.weight") if name in named), None) or next(patterns, "_default")
    return named.get(key) is not None


def _matches(pattern: str, layer: str) -> bool:
    """Whether a pattern is that of the whole name."""
    return names_layer(f"{REGEX}(?:{pattern.removeprefix(REGEX)})$", layer)


def _form(stated: Mapping[str, Any], kind: Any, fields: Any) -> Form:
    if str(kind) not in _KINDS:
        names = " or ".join(name for name in _KINDS if name[0].isupper())
        raise ValueError(f"its weights are of {kind}, not of {names}")
    weights, inputs = _KINDS[str(kind)]
    excluded = _excluded(stated)
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
    return Fp8Form(block, excluded, weight=DATA, scales=(SCALE,))


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

"""The fields of a `quantization_config`: spellings are made one, and other values are refused by file, key and value.

A value is accepted if transformers or the library of its format accepts it. Which forms layers support is not asked
here: the module of a format says that. Torch-free.

    every method         quant_method in any case
    awq, gptq            sizes in quotes
    auto-round           the method and the fields of awq or gptq
    compressed-tensors   likewise, and type and strategy in any case, as its own classes read them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from srv.errors import ModelError
from srv.models.checkpoints.text_names import text_weight_name
from srv.quantization.formats import auto_round

MAX_SIZE = 1 << 28  # inputs or outputs that share a scale
FIELD = "quantization_config"
_COMPRESSED = "compressed-tensors"
_LOWER = ("type", "strategy")  # of compressed-tensors
_COUNTS = ("num_bits", "bits", "w_bit", "group_size", "q_group_size")  # may be in quotes


class _Kind(NamedTuple):
    """What the value of a field must be; null is the same as absent."""

    fits: Callable[[Any], bool]
    expected: str


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_integer(value) and 0 < value <= MAX_SIZE


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, str) for element in value)


_OBJECT = _Kind(lambda value: isinstance(value, Mapping), "an object")
_TEXT = _Kind(lambda value: isinstance(value, str), "a string")
_FLAG = _Kind(lambda value: value in (True, False), "true or false")
_NAMES = _Kind(_is_names, "a list of names")
_BITS = _Kind(lambda value: _is_integer(value) and 0 < value <= 16, "an integer from 1 to 16")
_GROUP = _Kind(
    lambda value: _is_size(value) or (_is_integer(value) and value == -1), f"-1, or an integer from 1 to {MAX_SIZE}"
)
_PAIR = _Kind(
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_size, value)),
    f"a list of two integers from 1 to {MAX_SIZE}",
)
_EXCLUDED = {"modules_to_not_convert": _NAMES}
_PACKED = {
    **{"bits": _BITS, "w_bit": _BITS, "group_size": _GROUP, "q_group_size": _GROUP, **_EXCLUDED},
    **dict.fromkeys(("desc_act", "sym", "zero_point", "lm_head"), _FLAG),
    **dict.fromkeys(("version", "format", "checkpoint_format", "pack_dtype", "backend"), _TEXT),
}
_FIELDS: Mapping[str, Mapping[str, _Kind]] = MappingProxyType(
    {
        "awq": _PACKED,
        "gptq": {**_PACKED, "dynamic": _OBJECT},
        "fp8": {**_EXCLUDED, "ignored_layers": _NAMES, "weight_block_size": _PAIR, "activation_scheme": _TEXT},
        "fbgemm_fp8": _EXCLUDED,
        "mxfp4": _EXCLUDED,
        "w8a8_int8": {"ignore": _NAMES},
        "torchao": _EXCLUDED,
        "bitsandbytes": {
            **dict.fromkeys(("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"), _FLAG),
            **{"bnb_4bit_quant_type": _TEXT, "llm_int8_skip_modules": _NAMES},
        },
        "modelopt": {
            **{"quantization": _OBJECT, "quant_algo": _TEXT, "group_size": _GROUP},
            **{"ignore": _NAMES, "exclude_modules": _NAMES},
        },
        _COMPRESSED: {"ignore": _NAMES, "config_groups": _OBJECT, "format": _TEXT, "sparsity_config": _OBJECT},
    }
)
_GROUP_FIELDS: Mapping[str, _Kind] = MappingProxyType(
    {"targets": _NAMES, "weights": _OBJECT, "input_activations": _OBJECT, "format": _TEXT}
)
_WEIGHT_FIELDS: Mapping[str, _Kind] = MappingProxyType(
    {
        **{"num_bits": _BITS, "type": _TEXT, "strategy": _TEXT, "symmetric": _FLAG},
        "group_size": _Kind(
            lambda value: _is_integer(value) and -1 <= value <= MAX_SIZE, f"an integer from -1 to {MAX_SIZE}"
        ),
    }
)
# Fields that name layers as the whole model does, also in a language model that is served alone.
_NAMING = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "ignore", "exclude_modules")


def read_quantization(file: str, config: Mapping[str, Any], *, text_part: bool = False) -> dict[str, Any]:
    """A configuration whose `quantization_config` has one spelling of each value.

    `text_part`: it is that of the language model of a larger one, whose layers are named as they are there. Raises
    ModelError (unsupported_config) for the first field with another value, or for a `quantization_config` that is no
    object.
    """
    changed = dict(config)
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and nested.get(FIELD) is not None:
        changed["text_config"] = {**nested, FIELD: _read(file, f"text_config.{FIELD}", nested[FIELD])}
    if config.get(FIELD) == {}:
        del changed[FIELD]  # it says nothing
    elif config.get(FIELD) is not None:
        changed[FIELD] = _read(file, FIELD, config[FIELD])
        if text_part:
            changed[FIELD] = _with_own_names(changed[FIELD])
    return changed


def _read(file: str, name: str, quant_config: Any) -> dict[str, Any]:
    if not isinstance(quant_config, Mapping):
        _refuse(file, name, quant_config, "an object")
    method = quant_config.get("quant_method")
    if not isinstance(method, str | None):
        _refuse(file, f"{name}.quant_method", method, "a string")
    fields = {key: value for key, value in quant_config.items() if key != "quant_method"}
    if method is None and any(quant_config.get(flag) for flag in ("load_in_4bit", "load_in_8bit")):
        method = "bitsandbytes"  # as transformers reads it
    if method is not None:
        fields["quant_method"] = method = method.lower()
    if method in auto_round.NAMES:
        fields = auto_round.as_packed(_unquoted(fields))
        method = fields["quant_method"]
    elif method in ("awq", "gptq"):
        fields = _unquoted(fields)
    elif method == _COMPRESSED and isinstance(groups := quant_config.get("config_groups"), Mapping):
        fields["config_groups"] = {name: _of_group(group) for name, group in groups.items()}
    for key, value, expected in _wrong(method or "", fields):
        _refuse(file, f"{name}.{key}", value, expected)
    return fields


def _refuse(file: str, key: str, value: Any, expected: str) -> NoReturn:
    reason = f"{key} is {repr(value)[:80]}; it must be {expected}"
    raise ModelError("unsupported_config", file, reason, "Correct the value, or fetch the file again")


def _unquoted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With sizes as numbers."""
    quoted = {name: value for name in _COUNTS if isinstance(value := fields.get(name), str)}
    return {**fields, **{name: int(text) for name, text in quoted.items() if text.removeprefix("-").isdecimal()}}


def _of_group(group: Any) -> Any:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return group
    read = _unquoted(weights)
    for name in _LOWER:
        if isinstance(read.get(name), str):
            read[name] = read[name].lower()
    return {**group, "weights": read}


def _wrong(method: str, quant_config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it must be) of each field that no tool of a method reads."""
    yield from _unfit("", quant_config, _FIELDS.get(method, {}))
    if method == "modelopt":
        yield from _unfit("quantization.", quant_config.get("quantization") or {}, _FIELDS[method])
    for name, group in (quant_config.get("config_groups") or {}).items() if method == _COMPRESSED else ():
        if not isinstance(group, Mapping):
            yield f"config_groups.{name}", group, "an object"
        else:
            yield from _unfit(f"config_groups.{name}.", group, _GROUP_FIELDS)
            yield from _unfit(f"config_groups.{name}.weights.", group.get("weights") or {}, _WEIGHT_FIELDS)


def _unfit(prefix: str, fields: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> Iterator[tuple[str, Any, str]]:
    for key, kind in kinds.items():
        if fields.get(key) is not None and not kind.fits(fields[key]):
            yield prefix + key, fields[key], kind.expected


def _with_own_names(quant_config: Mapping[str, Any]) -> dict[str, Any]:
    """With the names that layers have in a language model that is served alone."""
    lists = {name: quant_config[name] for name in _NAMING if isinstance(quant_config.get(name), list)}
    return {
        **quant_config,
        **{name: [text_weight_name(pattern) or pattern for pattern in names] for name, names in lists.items()},
    }

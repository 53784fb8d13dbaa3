"""The types and bounds of configuration fields: a value that cannot be right is refused by file, key and value.

Owns the fields that our readers compute with whatever the architecture, and the rules for those of one architecture,
whose types are those of its defaults. All others are left alone, since models of other architectures may give them any
meaning. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from srv.errors import ModelError
from srv.models.config.limits import MAX_SIZE
from srv.models.families.registry import find
from srv.models.families.trees import MAX_LAYERS

MAX_NUMBER = 1e12  # far beyond every size, base and factor in use, and far from the end of float32
COUNTS = (
    "head_dim",
    "num_key_value_heads",
    "num_kv_heads",
    "intermediate_size",
    "sliding_window",
    "max_window_layers",
    "index_topk_freq",
    "index_skip_topk_offset",
    "n_routed_experts",
    "global_head_dim",
    "num_global_key_value_heads",
)
SIZES = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_d_ssm"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "conv1d_width", "conv_L_cache", "lru_width", "attention_window_size"),
    *("index_n_heads", "index_head_dim", "index_topk", "gated_norm_rank", "hc_mult"),
    "original_max_position_embeddings",
)
PER_LAYER = ("intermediate_size",)  # counts that may be lists: Gemma 3n has one for each layer
NUMBERS = (
    "partial_rotary_factor",
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "key_multiplier", "lm_head_multiplier"),
    *("linear_attn_alpha_factor", "linear_attn_beta_factor", "full_attn_alpha_factor", "full_attn_beta_factor"),
)
DIVISORS = ("logits_scaling", "rope_theta", "rope_local_base_freq")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
STRINGS = ("hidden_act", "hidden_activation", "model_type")
OBJECTS = ("vision_config", "auto_map")
LISTS = ("layer_types", "layers_block_type", "block_types", "architectures")
ROPE_KEYS = ("rope_scaling", "rope_parameters")
ROPE_STRINGS = ("rope_type", "type")
ROPE_LISTS = ("short_factor", "long_factor", "freq_factors")
ROPE_DIVISORS = ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_LENGTHS = ("beta_fast", "beta_slow")  # 0 is as if they were left out
ROPE_NUMBERS = ("partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim")
_A_DIVISOR = f"a number above 0, up to {MAX_NUMBER:g}"
_BELOW = ("sliding_window", "max_window_layers", "moe_layer_end_index", "pad_token_id")  # a value below 0 is for none
_POSITIVE = (
    *SIZES,
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
    *("kv_lora_rank", "v_head_dim"),
)
# Integers of which some architectures have no default, and those of which some have a list with one for each layer.
_NO_DEFAULT = (
    *("num_experts", "num_experts_per_tok", "num_shared_experts", "n_shared_experts", "n_routed_experts"),
    *("moe_intermediate_size", "top_k_experts"),
)
_LISTED = (
    "intermediate_size",
    "moe_intermediate_size",
    "moe_layer_freq",
    "moe_topk",
    "num_experts",
    "num_shared_expert",
)
_ANY = ("eos_token_id",)  # a number or a list of them
_MAX_EXPERTS = 1 << 14
REMEDY = "Correct the value, or fetch the file again"


def check_fields(file: str, config: Mapping[str, Any]) -> None:
    """Raises ModelError (unsupported_config) for the first known field whose value has the wrong type or size."""
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        _refuse(file, "text_config", nested, "an object")
    for prefix, fields in (("", config), ("text_config.", nested or {})):
        for key, value, expected in _wrong(fields):
            _refuse(file, prefix + key, value, expected)


def check_own_fields(file: str, architecture: str, config: Mapping[str, Any]) -> None:
    """Likewise for the fields of an architecture that srv knows: each has the type of its default.

    `config`: of the language model.
    """
    known = find(architecture)
    if known is None:
        return
    names, defaults = {**known.names, **known.former_names}, {**known.text_defaults, **known.with_defaults({})}
    for key, value in config.items():
        own = names.get(key, key)
        default = 0 if own in _NO_DEFAULT and own in defaults else defaults.get(own)
        expected = None if value is None or own in _ANY else _unlike(own, default, value)
        if expected is not None:
            _refuse(file, key, value, expected)


def _unlike(name: str, default: Any, value: Any) -> str | None:
    """What the value of a field must be whose default has another type; None if it may be what it is."""
    match default:
        case bool():
            return None if isinstance(value, bool) or value in (0, 1) else "true or false"
        case int() if isinstance(value, list) and name in _LISTED:
            return None
        case "auto":
            right = value == default or (_is_whole(value) and 0 < value <= MAX_SIZE)
            return None if right else f"auto or an integer from 1 to {MAX_SIZE}"
        case int():
            lowest = -1 if name in _BELOW else int(name in _POSITIVE)
            highest = MAX_LAYERS if "_layers" in name else _MAX_EXPERTS if "experts" in name else MAX_SIZE
            return None if _is_whole(value) and lowest <= value <= highest else f"an integer from {lowest} to {highest}"
        case float():
            return None if _is_number(value) else f"a number up to {MAX_NUMBER:g}"
        case list() | tuple():
            return None if isinstance(value, list | tuple) else "a list"
        case _:
            return None


def _wrong(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it must be) of each field that cannot be right; null is the same as absent."""
    for key in COUNTS:
        per_layer = key in PER_LAYER and isinstance(config.get(key), list)
        if not all(_may_be(each, _is_count) for each in (config[key] if per_layer else [config.get(key)])):
            yield key, config[key], f"an integer up to {MAX_SIZE}"
        elif key not in _BELOW and not per_layer and (config.get(key) or 0) < 0:
            yield key, config[key], f"an integer from 0 to {MAX_SIZE}"
    for key in SIZES:
        if not _may_be(config.get(key), lambda value: _is_count(value) and value > 0):
            yield key, config[key], f"an integer from 1 to {MAX_SIZE}"
    for key in DIVISORS:
        if not _may_be(config.get(key), _is_divisor):
            yield key, config[key], _A_DIVISOR
    for key in EPSILONS:
        if not _may_be(config.get(key), lambda value: _is_number(value) and value >= 0):
            yield key, config[key], f"a number from 0 to {MAX_NUMBER:g}"
    for key in NUMBERS:
        if not _may_be(config.get(key), _is_number):
            yield key, config[key], f"a number up to {MAX_NUMBER:g}"
    for key in STRINGS:
        if not isinstance(config.get(key), str | None):
            yield key, config[key], "a string"
    for key in LISTS:
        if not _may_be(config.get(key), lambda value: isinstance(value, list) and all(map(_is_text, value))):
            yield key, config[key], "a list of strings"
    for key in OBJECTS:
        if not isinstance(config.get(key), Mapping | None):
            yield key, config[key], "an object"
    if not _may_be(config.get("eos_token_id"), lambda value: all(map(_is_whole, _each(value)))):
        yield "eos_token_id", config["eos_token_id"], "a token's id, or a list of them"
    frequency = config.get("moe_layer_freq")
    if not isinstance(frequency, list | None) and not (_is_count(frequency) and frequency > 0):
        yield "moe_layer_freq", frequency, f"an integer from 1 to {MAX_SIZE}, or a list"
    for key in ROPE_KEYS:
        value = config.get(key)
        if not isinstance(value, Mapping | None):
            yield key, value, "an object"
        elif value is not None:
            yield from _wrong_in_rope(key, value)


def _wrong_in_rope(prefix: str, parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for kind, value in parameters.items():
        if kind in ROPE_STRINGS and not isinstance(value, str | None):
            yield f"{prefix}.{kind}", value, "a string"
        elif kind in ROPE_DIVISORS and not _may_be(value, _is_divisor):
            yield f"{prefix}.{kind}", value, _A_DIVISOR
        elif kind in ROPE_LENGTHS and not _may_be(value, lambda value: _is_number(value) and value >= 0):
            yield f"{prefix}.{kind}", value, f"a number from 0 to {MAX_NUMBER:g}"
        elif kind in ROPE_NUMBERS and not _may_be(value, _is_number):
            yield f"{prefix}.{kind}", value, f"a number up to {MAX_NUMBER:g}"
        elif kind in ROPE_LISTS and not _may_be(value, _is_list_of_numbers):
            yield f"{prefix}.{kind}", value, f"a list of numbers up to {MAX_NUMBER:g}"
        elif isinstance(value, Mapping):  # parameters of one kind of layers
            yield from _wrong_in_rope(f"{prefix}.{kind}", value)


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _may_be(value: Any, check: Callable[[Any], bool]) -> bool:
    return value is None or check(value)


def _is_count(value: Any) -> bool:
    return _is_number(value, MAX_SIZE) and value == int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_number(value: Any, limit: float = MAX_NUMBER) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= limit if isinstance(value, int) else math.isfinite(value) and abs(value) <= limit


def _refuse(file: str, key: str, value: Any, expected: str) -> None:
    huge = isinstance(value, int) and abs(value) > MAX_NUMBER
    shown = "a huge integer" if huge else repr(value)[:80]
    raise ModelError("unsupported_config", file, f"{key} is {shown}; it must be {expected}", REMEDY)

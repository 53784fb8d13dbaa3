"""The types and bounds of configuration fields: a value that cannot be right is refused by file, key and value.

Owns the fields that our readers and layers compute with. All others are left alone, since models of other
architectures may give them any meaning. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from srv.errors import ModelError
from srv.models.config.limits import MAX_SIZE

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
    "original_max_position_embeddings",
)
SIZES = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_d_ssm"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "conv1d_width", "conv_L_cache", "lru_width", "attention_window_size"),
    *("index_n_heads", "index_head_dim", "index_topk", "gated_norm_rank", "hc_mult"),
)
PER_LAYER = ("intermediate_size",)  # counts that may be lists: Gemma 3n has one for each layer
NUMBERS = (
    "partial_rotary_factor",
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "key_multiplier", "lm_head_multiplier"),
    *("linear_attn_alpha_factor", "linear_attn_beta_factor", "full_attn_alpha_factor", "full_attn_beta_factor"),
)
DIVISORS = ("logits_scaling", "rope_theta")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
STRINGS = ("hidden_act", "hidden_activation", "model_type")
ROPE_KEYS = ("rope_scaling", "rope_parameters")
ROPE_STRINGS = ("rope_type", "type")
ROPE_LISTS = ("short_factor", "long_factor", "freq_factors")
ROPE_DIVISORS = ("factor", "rope_theta")
ROPE_NUMBERS = (
    "partial_rotary_factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
)
_A_DIVISOR = f"a number above 0, up to {MAX_NUMBER:g}"
REMEDY = "Correct the value, or fetch the file again"


def check_fields(file: str, config: Mapping[str, Any]) -> None:
    """Raises ModelError (unsupported_config) for the first known field whose value has the wrong type or size."""
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        _refuse(file, "text_config", nested, "an object")
    for prefix, fields in (("", config), ("text_config.", nested or {})):
        for key, value, expected in _wrong(fields):
            _refuse(file, prefix + key, value, expected)


def _wrong(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it must be) of each field that cannot be right; null is the same as absent."""
    for key in COUNTS:
        per_layer = key in PER_LAYER and isinstance(config.get(key), list)
        if not all(_may_be(each, _is_count) for each in (config[key] if per_layer else [config.get(key)])):
            yield key, config[key], f"an integer up to {MAX_SIZE}"
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
    for key in ROPE_KEYS:
        value = config.get(key)
        if not isinstance(value, Mapping | None):
            yield key, value, "an object"
        elif value is not None:
            yield from _wrong_in_rope(key, value)


def _wrong_in_rope(prefix: str, parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for kind, value in parameters.items():
        if isinstance(value, Mapping):  # parameters of one kind of layers
            yield from _wrong_in_rope(f"{prefix}.{kind}", value)
        elif kind in ROPE_STRINGS and not isinstance(value, str | None):
            yield f"{prefix}.{kind}", value, "a string"
        elif kind in ROPE_DIVISORS and not _may_be(value, _is_divisor):
            yield f"{prefix}.{kind}", value, _A_DIVISOR
        elif kind in ROPE_NUMBERS and not _may_be(value, _is_number):
            yield f"{prefix}.{kind}", value, f"a number up to {MAX_NUMBER:g}"
        elif kind in ROPE_LISTS and not _may_be(value, _is_list_of_numbers):
            yield f"{prefix}.{kind}", value, f"a list of numbers up to {MAX_NUMBER:g}"


def _may_be(value: Any, check: Callable[[Any], bool]) -> bool:
    return value is None or check(value)


def _is_count(value: Any) -> bool:
    return _is_number(value, MAX_SIZE) and value == int(value)


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

"""Rules for KV pools: which dtypes, scales and ratios of pools fit together."""

from __future__ import annotations

from srv.dtypes import FLOAT8
from srv.platform.facts import Constraint, ResolutionContext


def _ratio_of_separate_pools(context: ResolutionContext) -> str | None:
    if context["swa_full_tokens_ratio"] is None or not context["disable_hybrid_swa_memory"]:
        return None
    return "all layers share one pool (disable_hybrid_swa_memory is true)"


def _no_8_bit_latents(context: ResolutionContext) -> str | None:
    if context["kv_cache_dtype"] not in FLOAT8 or context.model is None or not context.model.latents:
        return None
    return "scales are for keys and values, and the model stores compressed vectors instead (MLA)"


def _scales_of_floats(context: ResolutionContext) -> str | None:
    if context["quantization_param_path"] is None or context["kv_cache_dtype"] in FLOAT8:
        return None
    return f"the file has the scales of a KV pool of 8-bit floats, and kv_cache_dtype is {context['kv_cache_dtype']}"


def _calculated_for_floats(context: ResolutionContext) -> str | None:
    if not context["calculate_kv_scales"] or context["kv_cache_dtype"] in FLOAT8:
        return None
    return f"only a KV pool of 8-bit floats has scales per layer, and kv_cache_dtype is {context['kv_cache_dtype']}"


def _scales_are_given(context: ResolutionContext) -> str | None:
    path = context["quantization_param_path"]
    return f"the file {path} has the scales" if context["calculate_kv_scales"] and path is not None else None


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint("kv_cache_dtype", "dtype_missing", _no_8_bit_latents, "Leave it out."),
    Constraint(
        "quantization_param_path",
        "other_missing",
        _scales_of_floats,
        "Set --kv-cache-dtype fp8_e4m3 too, or leave it out.",
        reads=("kv_cache_dtype",),
    ),
    Constraint(
        "calculate_kv_scales",
        "other_missing",
        _calculated_for_floats,
        "Set --kv-cache-dtype fp8_e4m3 too, or leave it out.",
        reads=("kv_cache_dtype",),
    ),
    Constraint(
        "calculate_kv_scales",
        "excluded",
        _scales_are_given,
        "Leave one of the two out.",
        reads=("quantization_param_path",),
    ),
    Constraint(
        "swa_full_tokens_ratio",
        "excluded",
        _ratio_of_separate_pools,
        "Leave one of the two out.",
        reads=("disable_hybrid_swa_memory",),
    ),
)

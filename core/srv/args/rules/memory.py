"""Rules for KV pools and cache tiers: the requirements of model families and of storage backends."""

from __future__ import annotations

from srv.args.rules.reserve import RESERVED_MEMORY
from srv.dtypes import FLOAT8
from srv.platform.facts import Constraint, Contribution, Default, ResolutionContext

_VISION_LAYERS, _VISION_WIDTH = 24, 1024  # of ViT-L/14, the encoder to which the factors below apply


def _vision_share(context: ResolutionContext) -> float:
    """The share of the remaining memory: 5 % for an encoder of the size of ViT-L/14, up to 24 % for a larger one."""
    vision = context.model.config.get("vision_config") if context.model else None
    if not context["enable_multimodal"] or not isinstance(vision, dict):
        return 0.0
    layers, width = vision.get("num_hidden_layers", _VISION_LAYERS), vision.get("hidden_size", _VISION_WIDTH)
    if not isinstance(layers, int) or not isinstance(width, int):
        return 0.0
    relative_size = layers * width**2 / (_VISION_LAYERS * _VISION_WIDTH**2)
    return 1.0 - 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (relative_size - 1.0)))


def _prefix_cache_enabled(context: ResolutionContext) -> str | None:
    if not context["enable_hierarchical_cache"] or not context["disable_radix_cache"]:
        return None
    return "there is no prefix cache (disable_radix_cache is true)"


def _single_tier_manager(context: ResolutionContext) -> str | None:
    if not context["enable_lmcache"] or not context["enable_hierarchical_cache"]:
        return None
    return "enable_hierarchical_cache already manages the cache tiers"


def _mooncake_needs_page_layout(context: ResolutionContext) -> str | None:
    if context["hicache_storage_backend"] != "mooncake" or context["hicache_mem_layout"] != "layer_first":
        return None
    return "mooncake stores whole pages, and in layer_first a page is not contiguous"


def _mooncake_needs_kernel_copies(context: ResolutionContext) -> str | None:
    if context["hicache_storage_backend"] != "mooncake" or context["hicache_io_backend"] != "direct":
        return None
    return "mooncake stores whole pages, which only the copy method kernel can gather"


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


DEFAULTS: tuple[Default, ...] = (
    Default(
        "hicache_mem_layout",
        lambda context: "page_first" if context["hicache_storage_backend"] == "mooncake" else None,
        "mooncake stores whole pages",
        reads=("hicache_storage_backend",),
    ),
)

CONTRIBUTIONS: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "vision",
        _vision_share,
        "the vision encoder and its images need that share of the remaining memory",
        reads=("enable_multimodal",),
        of_remaining=True,
    ),
)

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
    Constraint(
        "enable_hierarchical_cache",
        "excluded",
        _prefix_cache_enabled,
        "Leave one of the two out.",
        reads=("disable_radix_cache",),
    ),
    Constraint(
        "enable_lmcache",
        "excluded",
        _single_tier_manager,
        "Leave one of the two out.",
        reads=("enable_hierarchical_cache",),
    ),
    Constraint(
        "hicache_mem_layout",
        "excluded",
        _mooncake_needs_page_layout,
        "Leave it out; the default is then page_first.",
        reads=("hicache_storage_backend",),
    ),
    Constraint(
        "hicache_io_backend",
        "excluded",
        _mooncake_needs_kernel_copies,
        "Leave it out, or set it to kernel.",
        reads=("hicache_storage_backend",),
    ),
)

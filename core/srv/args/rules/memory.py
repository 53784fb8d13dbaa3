"""Rules of pools and tiers: what a device's memory allows, and what a family of models needs."""

from __future__ import annotations

from srv.args.rules.reserve import RESERVED_MEMORY
from srv.platform.facts import Constraint, Contribution, Default, Seen

_ONE_POOL = frozenset(
    {
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration",
        "GptOssForCausalLM",
    }
)
_VISION_LAYERS, _VISION_WIDTH = 24, 1024  # of ViT-L/14, the encoder that the figures below are for


def _vision_share(seen: Seen) -> float:
    """A twentieth of what is left for an encoder like ViT-L/14, more for a larger one, up to 24 %."""
    vision = seen.model.config.get("vision_config") if seen.model else None
    if not seen["enable_multimodal"] or not isinstance(vision, dict):
        return 0.0
    layers, width = vision.get("num_hidden_layers", _VISION_LAYERS), vision.get("hidden_size", _VISION_WIDTH)
    if not isinstance(layers, int) or not isinstance(width, int):
        return 0.0
    times = layers * width**2 / (_VISION_LAYERS * _VISION_WIDTH**2)
    return 1.0 - 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (times - 1.0)))


def _one_reuse(seen: Seen) -> str | None:
    if not seen["enable_hierarchical_cache"] or not seen["disable_radix_cache"]:
        return None
    return "there are no cached prefixes to keep (disable_radix_cache is true)"


def _one_keeper(seen: Seen) -> str | None:
    if not seen["enable_lmcache"] or not seen["enable_hierarchical_cache"]:
        return None
    return "enable_hierarchical_cache keeps the tiers already"


def _mooncake_order(seen: Seen) -> str | None:
    if seen["hicache_storage_backend"] != "mooncake" or seen["hicache_mem_layout"] != "layer_first":
        return None
    return "mooncake stores whole pages, and layer_first scatters a page over the layers"


def _mooncake_copies(seen: Seen) -> str | None:
    if seen["hicache_storage_backend"] != "mooncake" or seen["hicache_io_backend"] != "direct":
        return None
    return "mooncake stores whole pages, which only a kernel gathers"


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_hybrid_swa_memory",
        lambda seen: True if seen.model and seen.model.architecture in _ONE_POOL else None,
        "windowed layers of this family cannot have a pool of their own",
    ),
)

DEFAULTS: tuple[Default, ...] = (
    Default(
        "hicache_mem_layout",
        lambda seen: "page_first" if seen["hicache_storage_backend"] == "mooncake" else None,
        "mooncake stores whole pages",
        reads=("hicache_storage_backend",),
    ),
)

CONTRIBUTIONS: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "vision",
        _vision_share,
        "the vision encoder and the images in it need that share of the rest",
        reads=("enable_multimodal",),
        of_rest=True,
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "enable_hierarchical_cache",
        "excluded",
        _one_reuse,
        "Leave one of the two out.",
        reads=("disable_radix_cache",),
    ),
    Constraint(
        "enable_lmcache", "excluded", _one_keeper, "Leave one of the two out.", reads=("enable_hierarchical_cache",)
    ),
    Constraint(
        "hicache_mem_layout",
        "excluded",
        _mooncake_order,
        "Leave it out to take page_first.",
        reads=("hicache_storage_backend",),
    ),
    Constraint(
        "hicache_io_backend",
        "excluded",
        _mooncake_copies,
        "Leave it out, or set it to kernel.",
        reads=("hicache_storage_backend",),
    ),
)

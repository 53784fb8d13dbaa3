"""What is known about AMD GPUs without one: variants, profiles, capabilities, backends."""

from __future__ import annotations

from srv.platform.facts import DeviceFacts, PlatformFacts
from srv_rocm.placeholder import PLACEHOLDER
from srv_rocm.rules import CONSTRAINTS, CONTRIBUTIONS, DEFAULTS, aiter

VARIANTS = ("gfx942", "gfx950")

_GIB = 1 << 30

PROFILES = {
    "gfx942": DeviceFacts("gfx942", 192 * _GIB, 1, "AMD Instinct MI300X"),
    "gfx942-256gb": DeviceFacts("gfx942", 256 * _GIB, 1, "AMD Instinct MI325X"),
    "gfx950": DeviceFacts("gfx950", 288 * _GIB, 1, "AMD Instinct MI355X"),
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """All capabilities are the same for both variants."""
    return frozenset(
        {"paged_kv", "prefix_cache", "chunked_prefill", "overlap", "graphs", "float32", "float16", "bfloat16"}
    )


BACKENDS = {
    "attention": (
        PLACEHOLDER.attention("aiter", 20, aiter),
        PLACEHOLDER.attention("triton", 10),
    ),
    "sampling": (PLACEHOLDER.backend("pytorch", 10),),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    defaults=DEFAULTS,
    contributions=CONTRIBUTIONS,
    constraints=CONSTRAINTS,
    backends=BACKENDS,
)

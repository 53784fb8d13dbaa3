"""What is known of AMD GPUs without one: variants, profiles, capabilities, backends."""

from __future__ import annotations

from srv.platform.facts import BackendSpec, DeviceFacts, PlatformFacts, Requires, Seen

VARIANTS = ("gfx942", "gfx950")

_GIB = 1 << 30

PROFILES = {
    "gfx942": DeviceFacts("gfx942", 192 * _GIB, 1, "AMD Instinct MI300X"),
    "gfx942-256gb": DeviceFacts("gfx942", 256 * _GIB, 1, "AMD Instinct MI325X"),
    "gfx950": DeviceFacts("gfx950", 288 * _GIB, 1, "AMD Instinct MI355X"),
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """Both variants alike."""
    return frozenset(
        {"paged_kv", "prefix_cache", "chunked_prefill", "overlap", "graphs", "float32", "float16", "bfloat16"}
    )


def _fits(seen: Seen) -> Requires:
    return Requires()


BACKENDS = {
    "attention": (
        BackendSpec(
            name="triton",
            priority=10,
            check=_fits,
            target="srv_rocm.unbuilt:create",
            kv_order="page_token_head",
            summary="the Triton kernels of srv-kernels",
        ),
    ),
    "sampling": (
        BackendSpec(
            name="pytorch",
            priority=10,
            check=_fits,
            target="srv_rocm.unbuilt:create",
            summary="sorting and cumulative sums in torch",
        ),
    ),
}

FACTS = PlatformFacts(capabilities, PROFILES, backends=BACKENDS)

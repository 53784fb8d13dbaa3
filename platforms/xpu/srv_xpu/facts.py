"""What is known of Intel GPUs without one: variants, profiles, capabilities, defaults, backends."""

from __future__ import annotations

from srv.platform.facts import BackendSpec, DeviceFacts, PlatformFacts, Requires, Seen

VARIANTS = ("pvc", "bmg")

_GIB = 1 << 30

PROFILES = {
    "pvc": DeviceFacts("pvc", 64 * _GIB, 1, "Intel Data Center GPU Max 1550, one tile"),
    "bmg": DeviceFacts("bmg", 12 * _GIB, 1, "Intel Arc B580"),
    "bmg-24gb": DeviceFacts("bmg", 24 * _GIB, 1, "Intel Arc Pro B60"),
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """No graphs and no overlap: nobody has shown either to work on these devices yet."""
    return frozenset({"paged_kv", "prefix_cache", "chunked_prefill", "float32", "float16", "bfloat16"})


def _fits(seen: Seen) -> Requires:
    return Requires()


def _intel_xpu(seen: Seen) -> Requires:
    """Its kernels read pages of 64 or 128 tokens."""
    return Requires({"page_size": (64, 128)})


BACKENDS = {
    "attention": (
        BackendSpec(
            name="intel_xpu",
            priority=20,
            check=_intel_xpu,
            target="srv_xpu.unbuilt:create",
            kv_order="page_token_head",
            summary="Intel's flash attention kernels over pages of 64 or 128 tokens",
        ),
        BackendSpec(
            name="triton",
            priority=10,
            check=_fits,
            target="srv_xpu.unbuilt:create",
            kv_order="page_token_head",
            summary="the Triton kernels of srv-kernels",
        ),
    ),
    "sampling": (
        BackendSpec(
            name="pytorch",
            priority=10,
            check=_fits,
            target="srv_xpu.unbuilt:create",
            summary="sorting and cumulative sums in torch",
        ),
    ),
}

FACTS = PlatformFacts(capabilities, PROFILES, backends=BACKENDS)

"""What is known about AMD GPUs without one: variants, profiles, capabilities, backends."""

from __future__ import annotations

from srv.platform.facts import DeviceFacts, PlatformFacts
from srv_gpu import facts as gpu
from srv_rocm.rules import CONSTRAINTS, CONTRIBUTIONS, DEFAULTS, aiter

VARIANTS = ("gfx942", "gfx950", "gfx1100")

PROFILES = gpu.profiles(
    ("gfx942", "gfx942", 192, "AMD Instinct MI300X"),
    ("gfx942-256gb", "gfx942", 256, "AMD Instinct MI325X"),
    ("gfx950", "gfx950", 288, "AMD Instinct MI355X"),
    ("gfx1100", "gfx1100", 24, "AMD Radeon RX 7900 XTX"),
)

STAND_INS = {variant: {"amd-aiter": "simulated"} for variant in ("gfx942", "gfx950")}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """All capabilities are the same for every variant. Several ranks have not been run on any device."""
    return frozenset(gpu.capabilities(device) | {"overlap", "graphs", "bfloat16"})


BACKENDS = {
    "attention": (
        gpu.attention(
            "aiter", 20, aiter, "srv_gpu.aiter_attention:AiterAttention", lengths="host", traits=("soft_cap",)
        ),
        gpu.TRITON_ATTENTION,
        gpu.NATIVE_ATTENTION,
    ),
    "sampling": (gpu.PYTORCH_SAMPLING, gpu.TRITON_SAMPLING),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    defaults=DEFAULTS,
    contributions=CONTRIBUTIONS,
    constraints=CONSTRAINTS,
    backends=BACKENDS,
)

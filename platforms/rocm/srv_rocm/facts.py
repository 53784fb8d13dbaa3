"""What is known about AMD GPUs without one: variants, profiles, capabilities, backends."""

from __future__ import annotations

from srv.platform.experts import TORCH_EXPERTS
from srv.platform.facts import DeviceFacts, PlatformFacts
from srv_gpu import expert_specs, op_specs
from srv_gpu import facts as gpu
from srv_gpu.tools import AITER, AITER_MODULES
from srv_rocm.rules import CONSTRAINTS, CONTRIBUTIONS, DEFAULTS, aiter

VARIANTS = ("gfx942", "gfx950", "gfx1100")

PROFILES = gpu.profiles(
    ("gfx942", "gfx942", 192, "AMD Instinct MI300X"),
    ("gfx942-256gb", "gfx942", 256, "AMD Instinct MI325X"),
    ("gfx950", "gfx950", 288, "AMD Instinct MI355X"),
    ("gfx1100", "gfx1100", 24, "AMD Radeon RX 7900 XTX"),
)

CARDS = {
    "mi300x": PROFILES["gfx942"],
    "mi308x": gpu.profile("gfx942", 192, "AMD Instinct MI308X"),
    "mi325x": PROFILES["gfx942-256gb"],
    "mi350x": gpu.profile("gfx950", 288, "AMD Instinct MI350X"),
    "mi355x": PROFILES["gfx950"],
    "rx7900xtx": PROFILES["gfx1100"],
}

STAND_INS = {variant: {AITER: "simulated", AITER_MODULES: "simulated"} for variant in ("gfx942", "gfx950")}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """All capabilities are the same for every variant. Several ranks have run on simulated devices only."""
    return frozenset(gpu.capabilities(device) | {"overlap", "graphs", "piecewise_graphs", "bfloat16"})


BACKENDS = {
    "attention": (
        gpu.attention(
            "aiter", 20, aiter, "srv_gpu.aiter_attention:AiterAttention", lengths="host", traits=gpu.AITER_TRAITS
        ),
        gpu.TRITON_ATTENTION,
        gpu.NATIVE_ATTENTION,
    ),
    "sampling": (gpu.PYTORCH_SAMPLING, gpu.TRITON_SAMPLING),
    "moe": (expert_specs.AITER_EXPERTS, expert_specs.TRITON_EXPERTS, TORCH_EXPERTS),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    defaults=DEFAULTS,
    contributions=CONTRIBUTIONS,
    constraints=CONSTRAINTS,
    backends=BACKENDS,
    support=gpu.SUPPORT,
    ops=(expert_specs.AITER, *op_specs.OPS),
    cards=CARDS,
)

"""What is known about Intel GPUs without one: variants, profiles, capabilities, defaults, backends."""

from __future__ import annotations

from srv.args.rules.speculative import draft_tree_constraint
from srv.platform.experts import TORCH_EXPERTS
from srv.platform.facts import DeviceFacts, PlatformFacts
from srv_gpu import expert_specs, op_specs
from srv_gpu import facts as gpu

EXTENSION = "intel-extension-for-pytorch"
VARIANTS = ("pvc", "bmg")

PROFILES = gpu.profiles(
    ("pvc", "pvc", 64, "Intel Data Center GPU Max 1550, one tile"),
    ("bmg", "bmg", 12, "Intel Arc B580"),
    ("bmg-24gb", "bmg", 24, "Intel Arc Pro B60"),
)

CARDS = {
    "max1550": PROFILES["pvc"],
    "b580": PROFILES["bmg"],
    "b60": PROFILES["bmg-24gb"],
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """Graphs and overlap are missing, since neither has been shown to work on these devices yet."""
    return frozenset(gpu.capabilities(device) | {"bfloat16"})


BACKENDS = {
    "attention": (
        gpu.not_called("intel_xpu", 20),
        gpu.TRITON_ATTENTION,
        gpu.NATIVE_ATTENTION,
    ),
    "sampling": (gpu.PYTORCH_SAMPLING, gpu.TRITON_SAMPLING),
    "moe": (expert_specs.TRITON_EXPERTS, TORCH_EXPERTS),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    constraints=(draft_tree_constraint(),),
    backends=BACKENDS,
    support=gpu.SUPPORT,
    ops=op_specs.OPS,
    cards=CARDS,
)

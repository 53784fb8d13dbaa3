"""What is known about NVIDIA GPUs without one: variants, profiles, capabilities, backends and their requirements."""

from __future__ import annotations

import re

from srv.platform.experts import TORCH_EXPERTS
from srv.platform.facts import BackendSpec, DeviceFacts, PlatformFacts, Requires, ResolutionContext, Unfit
from srv_cuda.attention_specs import SPECS
from srv_cuda.rules import CONSTRAINTS, CONTRIBUTIONS, DEFAULTS
from srv_gpu import expert_specs, op_specs
from srv_gpu import facts as gpu
from srv_gpu.tools import FLASHINFER, JIT_CACHE, missing_flashinfer

VARIANTS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")

PROFILES = gpu.profiles(
    ("sm80", "sm80", 80, "NVIDIA A100 80GB"),
    ("sm80-40gb", "sm80", 40, "NVIDIA A100 40GB"),
    ("sm86", "sm86", 24, "NVIDIA GeForce RTX 3090"),
    ("sm86-12gb", "sm86", 12, "NVIDIA GeForce RTX 3060"),
    ("sm86-48gb", "sm86", 48, "NVIDIA RTX A6000"),
    ("sm89", "sm89", 24, "NVIDIA GeForce RTX 4090"),
    ("sm89-16gb", "sm89", 16, "NVIDIA GeForce RTX 4080"),
    ("sm89-48gb", "sm89", 48, "NVIDIA L40S"),
    ("sm90", "sm90", 80, "NVIDIA H100 80GB"),
    ("sm90-141gb", "sm90", 141, "NVIDIA H200 141GB"),
    ("sm100", "sm100", 180, "NVIDIA B200 180GB"),
    ("sm120", "sm120", 32, "NVIDIA GeForce RTX 5090"),
    ("sm120-16gb", "sm120", 16, "NVIDIA GeForce RTX 5080"),
    ("sm120-96gb", "sm120", 96, "NVIDIA RTX PRO 6000 Blackwell"),
)

CARDS = {
    "a100": PROFILES["sm80"],
    "a100-40gb": PROFILES["sm80-40gb"],
    "a800": gpu.profile("sm80", 80, "NVIDIA A800 80GB"),
    "a30": gpu.profile("sm80", 24, "NVIDIA A30"),
    "a10": gpu.profile("sm86", 24, "NVIDIA A10"),
    "a10g": gpu.profile("sm86", 24, "NVIDIA A10G"),
    "a40": gpu.profile("sm86", 48, "NVIDIA A40"),
    "a6000": PROFILES["sm86-48gb"],
    "rtx3060": PROFILES["sm86-12gb"],
    "rtx3090": PROFILES["sm86"],
    "l4": gpu.profile("sm89", 24, "NVIDIA L4"),
    "l20": gpu.profile("sm89", 48, "NVIDIA L20"),
    "l40": gpu.profile("sm89", 48, "NVIDIA L40"),
    "l40s": PROFILES["sm89-48gb"],
    "rtx4080": PROFILES["sm89-16gb"],
    "rtx4090": PROFILES["sm89"],
    "h100": PROFILES["sm90"],
    "h100-nvl": gpu.profile("sm90", 94, "NVIDIA H100 NVL"),
    "h800": gpu.profile("sm90", 80, "NVIDIA H800"),
    "h20": gpu.profile("sm90", 96, "NVIDIA H20"),
    "h200": PROFILES["sm90-141gb"],
    "gh200": gpu.profile("sm90", 96, "NVIDIA GH200 96GB"),
    "b200": PROFILES["sm100"],
    "rtx5080": PROFILES["sm120-16gb"],
    "rtx5090": PROFILES["sm120"],
    "rtxpro6000": PROFILES["sm120-96gb"],
}

_STAND_IN = "0.6.18+simulated"
STAND_INS = {variant: {FLASHINFER: _STAND_IN, JIT_CACHE: _STAND_IN} for variant in VARIANTS}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """bfloat16 needs compute capability 8.0. Several ranks have run on simulated devices only."""
    result = gpu.capabilities(device) | {"overlap", "graphs", "piecewise_graphs"}
    match = re.fullmatch(r"sm(\d+)", device.variant)
    if match and int(match[1]) >= 80:
        result.add("bfloat16")
    return frozenset(result)


def _flashinfer_sampling(context: ResolutionContext) -> Requires | Unfit:
    missing = missing_flashinfer(context.device)
    return Unfit(tuple(missing)) if missing else Requires()


BACKENDS = {
    "attention": (gpu.TRITON_ATTENTION, *SPECS, gpu.NATIVE_ATTENTION),
    "sampling": (
        BackendSpec("flashinfer", 20, _flashinfer_sampling, "srv_gpu.flashinfer_sampling:FlashInferSampling"),
        gpu.PYTORCH_SAMPLING,
        gpu.TRITON_SAMPLING,
    ),
    "moe": (expert_specs.TRITON_EXPERTS, expert_specs.FLASHINFER_EXPERTS, TORCH_EXPERTS),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    defaults=DEFAULTS,
    contributions=CONTRIBUTIONS,
    constraints=CONSTRAINTS,
    backends=BACKENDS,
    support=gpu.SUPPORT,
    ops=(op_specs.FLOAT32_PRODUCTS, expert_specs.FLASHINFER, *op_specs.OPS),
    cards=CARDS,
)

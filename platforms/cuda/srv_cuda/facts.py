"""What is known about NVIDIA GPUs without one: variants, profiles, capabilities, backends and their requirements."""

from __future__ import annotations

import re

from srv.platform.facts import BackendSpec, DeviceFacts, PlatformFacts, Requires, ResolutionContext, Unfit
from srv_cuda.attention_specs import SPECS, missing_package
from srv_cuda.rules import CONSTRAINTS, CONTRIBUTIONS, DEFAULTS
from srv_gpu import facts as gpu

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

STAND_INS = {variant: {"flashinfer-python": "0.6.18+simulated"} for variant in VARIANTS}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """bfloat16 needs compute capability 8.0. Several ranks have not been run on any device."""
    found = gpu.capabilities(device) | {"overlap", "graphs"}
    match = re.fullmatch(r"sm(\d+)", device.variant)
    if match and int(match[1]) >= 80:
        found.add("bfloat16")
    return frozenset(found)


def _flashinfer_sampling(context: ResolutionContext) -> Requires | Unfit:
    missing = missing_package(context)
    return Unfit(tuple(missing)) if missing else Requires()


BACKENDS = {
    "attention": (gpu.TRITON_ATTENTION, *SPECS, gpu.NATIVE_ATTENTION),
    "sampling": (
        BackendSpec("flashinfer", 20, _flashinfer_sampling, "srv_gpu.flashinfer_sampling:FlashInferSampling"),
        gpu.PYTORCH_SAMPLING,
        gpu.TRITON_SAMPLING,
    ),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    defaults=DEFAULTS,
    contributions=CONTRIBUTIONS,
    constraints=CONSTRAINTS,
    backends=BACKENDS,
)

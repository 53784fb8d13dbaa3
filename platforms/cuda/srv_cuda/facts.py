"""What is known about NVIDIA GPUs without one: variants, profiles, capabilities, backends and their requirements."""

from __future__ import annotations

import re

from srv.platform.facts import DeviceFacts, PlatformFacts, Requires, ResolutionContext, Unfit
from srv_cuda.attention_specs import SPECS, missing_package
from srv_cuda.placeholder import PLACEHOLDER
from srv_cuda.rules import CONSTRAINTS, CONTRIBUTIONS, DEFAULTS

VARIANTS = ("sm80", "sm90", "sm100")

_GIB = 1 << 30

PROFILES = {
    "sm80": DeviceFacts("sm80", 80 * _GIB, 1, "NVIDIA A100 80GB"),
    "sm80-40gb": DeviceFacts("sm80", 40 * _GIB, 1, "NVIDIA A100 40GB"),
    "sm90": DeviceFacts("sm90", 80 * _GIB, 1, "NVIDIA H100 80GB"),
    "sm90-141gb": DeviceFacts("sm90", 141 * _GIB, 1, "NVIDIA H200 141GB"),
    "sm100": DeviceFacts("sm100", 180 * _GIB, 1, "NVIDIA B200 180GB"),
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """bfloat16 needs compute capability 8.0; all other capabilities are the same on every variant."""
    found = {"paged_kv", "prefix_cache", "chunked_prefill", "overlap", "graphs", "float32", "float16"}
    match = re.fullmatch(r"sm(\d+)", device.variant)
    if match and int(match[1]) >= 80:
        found.add("bfloat16")
    return frozenset(found)


def _flashinfer_sampling(context: ResolutionContext) -> Requires | Unfit:
    missing = missing_package(context)
    return Unfit(tuple(missing)) if missing else Requires()


BACKENDS = {
    "attention": (
        PLACEHOLDER.attention("triton", 10),
        *SPECS,
    ),
    "sampling": (
        PLACEHOLDER.backend("flashinfer", 20, _flashinfer_sampling),
        PLACEHOLDER.backend("pytorch", 10),
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

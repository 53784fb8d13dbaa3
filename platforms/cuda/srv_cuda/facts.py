"""What is known of NVIDIA GPUs without one: variants, profiles, capabilities, backends and their demands."""

from __future__ import annotations

import re

from srv.platform.facts import DeviceFacts, PlatformFacts, Requires, Seen, Unfit
from srv_cuda.attention_specs import SPECS, model_reasons
from srv_cuda.rules import CONSTRAINTS, DEFAULTS
from srv_cuda.unbuilt import UNBUILT

VARIANTS = ("sm80", "sm90", "sm100")

_GIB = 1 << 30
_FLASHINFER_HEADS = (64, 128, 256)

PROFILES = {
    "sm80": DeviceFacts("sm80", 80 * _GIB, 1, "NVIDIA A100 80GB"),
    "sm80-40gb": DeviceFacts("sm80", 40 * _GIB, 1, "NVIDIA A100 40GB"),
    "sm90": DeviceFacts("sm90", 80 * _GIB, 1, "NVIDIA H100 80GB"),
    "sm90-141gb": DeviceFacts("sm90", 141 * _GIB, 1, "NVIDIA H200 141GB"),
    "sm100": DeviceFacts("sm100", 180 * _GIB, 1, "NVIDIA B200 180GB"),
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """bfloat16 needs compute capability 8.0; everything else holds for all that this platform knows."""
    words = {"paged_kv", "prefix_cache", "chunked_prefill", "overlap", "graphs", "float32", "float16"}
    match = re.fullmatch(r"sm(\d+)", device.variant)
    if match and int(match[1]) >= 80:
        words.add("bfloat16")
    return frozenset(words)


def _without_package(seen: Seen) -> tuple[str, ...]:
    """A reason if FlashInfer is missing. Versions are known of a machine that was probed, and of no profile: there
    its presence is assumed.
    """
    if not seen.device.versions or "flashinfer-python" in seen.device.versions:
        return ()
    return ("the package flashinfer-python is not installed",)


def _flashinfer(seen: Seen) -> Requires | Unfit:
    """FlashInfer compiles for certain head sizes, and is a package of its own."""
    reasons = list(_without_package(seen))
    if seen.model is not None and seen.model.head_dim not in _FLASHINFER_HEADS:
        reasons.append(f"head_dim {seen.model.head_dim} is not among {', '.join(map(str, _FLASHINFER_HEADS))}")
    reasons += model_reasons(seen)
    return Unfit(tuple(reasons)) if reasons else Requires()


def _flashinfer_sampling(seen: Seen) -> Requires | Unfit:
    missing = _without_package(seen)
    return Unfit(missing) if missing else Requires()


BACKENDS = {
    "attention": (
        UNBUILT.attention("flashinfer", 20, "FlashInfer's wrappers for paged KV, layout NHD", _flashinfer),
        UNBUILT.attention("triton", 10, "the Triton kernels of srv-kernels"),
        *SPECS,
    ),
    "sampling": (
        UNBUILT.backend("flashinfer", 20, "FlashInfer's sampling kernels, without sorting", _flashinfer_sampling),
        UNBUILT.backend("pytorch", 10, "sorting and cumulative sums in torch"),
    ),
}

FACTS = PlatformFacts(capabilities, PROFILES, defaults=DEFAULTS, constraints=CONSTRAINTS, backends=BACKENDS)

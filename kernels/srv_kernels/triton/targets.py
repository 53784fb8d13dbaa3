"""The GPUs that kernels are compiled for ahead of time, without hardware.

Triton's wheel has compilers for NVIDIA and AMD. It has none for XPU, where kernels are therefore only interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_OCP = frozenset({"fp8e4nv", "fp8e5"})  # float8_e4m3fn, float8_e5m2
_FNUZ = frozenset({"fp8e4b8", "fp8e5b16"})  # float8_e4m3fnuz, float8_e5m2fnuz


@dataclass(frozen=True, slots=True)
class Target:
    """name: sm90 or gfx942, for example. shared: bytes of shared memory that a program may use. float8: its types."""

    name: str
    backend: str
    arch: int | str
    threads_per_warp: int
    shared: int
    float8: frozenset[str]

    def gpu(self) -> Any:
        """The `GPUTarget`."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.threads_per_warp)


def _cuda(capability: int, shared: int, float8: frozenset[str]) -> Target:
    return Target(f"sm{capability}", "cuda", capability, 32, shared * 1024, float8)


def _hip(arch: str, threads: int, shared: int, float8: frozenset[str]) -> Target:
    return Target(arch, "hip", arch, threads, shared * 1024, float8)


# Triton refuses e4m3fn before sm89. It compiles e4m3fn for gfx942, in software: the hardware's and the platform's types
# there are the fnuz ones, so only these are evidence.
TARGETS = (
    _cuda(80, 163, frozenset({"fp8e5"})),
    _cuda(86, 99, frozenset({"fp8e5"})),
    _cuda(89, 99, _OCP),
    _cuda(90, 227, _OCP),
    _cuda(100, 227, _OCP),
    _cuda(120, 99, _OCP),
    _hip("gfx942", 64, 64, _FNUZ),
    _hip("gfx950", 64, 160, _OCP),
    _hip("gfx1100", 32, 64, _OCP),
)
BY_NAME = {target.name: target for target in TARGETS}
# Those whose matrix units multiply e4m3fn. gfx1100 converts it only, and gfx942 multiplies e4m3fnuz.
FLOAT8_DOTS = frozenset({"sm89", "sm90", "sm100", "sm120", "gfx950"})

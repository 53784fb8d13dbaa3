"""What each kernel is compiled as ahead of time: the dtypes, sizes and launch options that its launches use.

A module with kernels has a tuple `VARIANTS`. `srv_kernels.triton.compile` compiles each for every target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FLOATS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    types: Triton's type of each argument that is no constexpr, such as "*bf16" (a pointer), "i32" or "fp32". constants:
    the constexprs. aligned: integers that are multiples of 16 in ordinary launches, as all pointers are; Triton then
    emits wider loads. warps, stages: the launch's `num_warps` and `num_stages`. targets: the names of those that launch
    it, if their block sizes differ; otherwise empty.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """Distinguishes the variants of one kernel: pointer types in order, then constants."""
        pointers = ",".join(kind[1:] for kind in self.types.values() if kind.startswith("*"))
        constants = " ".join(f"{name}={value}" for name, value in self.constants.items())
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{pointers} {constants} warps={self.warps} stages={self.stages}{options}"

    def float8(self) -> frozenset[str]:
        """The float8 types among the arguments, which few targets have."""
        return frozenset(kind.lstrip("*") for kind in self.types.values() if "fp8" in kind)


def pointers(kinds: Mapping[str, str], *integers: str) -> dict[str, str]:
    """Types of arguments: pointers to `kinds`, then 32-bit integers."""
    return {name: f"*{kind}" for name, kind in kinds.items()} | dict.fromkeys(integers, "i32")

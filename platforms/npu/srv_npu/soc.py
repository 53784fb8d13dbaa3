"""The generation of a device, by the SoC number that its runtime reports. Imports no torch.

The numbers are those of torch_npu (csrc/core/npu/NpuVariables.h). The probe reads the number at run time, since one
wheel of torch_npu serves all generations, and so does this package.
"""

from __future__ import annotations

# First and last number, the generation, and this platform's variant if it supports the generation.
_GENERATIONS = (
    (100, 104, "Ascend 910A", None),
    (200, 205, "Ascend 310P", None),
    (220, 225, "A2 (Ascend 910B)", "a2"),
    (240, 243, "Ascend 310B", None),
    (250, 255, "A3 (Ascend 910_93)", "a3"),
    (260, 260, "A5 (Ascend 950)", None),
)


def variant_of(soc: int) -> str | None:
    """The platform's variant for a SoC number; None if the generation is not supported."""
    return next((variant for first, last, _, variant in _GENERATIONS if first <= soc <= last), None)


def generation_of(soc: int) -> str:
    """The generation's name, for messages; an unknown generation is named by its SoC number."""
    names = (name for first, last, name, _ in _GENERATIONS if first <= soc <= last)
    return next(names, f"an unknown generation (SoC number {soc})")

"""Which generation a device is of, by the SoC number that its runtime reports. Torch-free data.

The numbers are those of torch_npu (csrc/core/npu/NpuVariables.h). A number is asked for at run time, in the probe:
one wheel of torch_npu serves all generations, and so does this package.
"""

from __future__ import annotations

# First and last number, the generation, and whether this platform serves it.
_GENERATIONS = (
    (100, 104, "Ascend 910A", None),
    (200, 205, "Ascend 310P", None),
    (220, 225, "A2 (Ascend 910B)", "a2"),
    (240, 243, "Ascend 310B", None),
    (250, 255, "A3 (Ascend 910_93)", "a3"),
    (260, 260, "A5 (Ascend 950)", None),
)


def variant_of(soc: int) -> str | None:
    """The platform's variant of a SoC number; None if it serves none such."""
    return next((variant for first, last, _, variant in _GENERATIONS if first <= soc <= last), None)


def generation_of(soc: int) -> str:
    """The generation's name, for people; a number of which nothing is known names itself."""
    known = (name for first, last, name, _ in _GENERATIONS if first <= soc <= last)
    return next(known, f"an unknown generation (SoC number {soc})")

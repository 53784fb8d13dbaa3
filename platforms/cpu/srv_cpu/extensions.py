"""Optional packages with kernels for processors: zentorch (AMD) and intel-extension-for-pytorch. Neither is required.

    package                       torch                      used for
    zentorch                      of the same minor version  linear, rms_norm, add_rms_norm in float32 and bfloat16
    intel-extension-for-pytorch   2.8, its last release      rms_norm, add_rms_norm in float32 and bfloat16

They come after the native kernels of srv-kernels, and before torch's operators. A package that does not fit torch is
not imported: both change torch when they are, and intel-extension-for-pytorch ends the process if it finds another.

zentorch was run with release 2.13.0.2 on Zen 4; intel-extension-for-pytorch was not run: it needs torch 2.8.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from srv.platform.host import versions
from srv.platform.interface import Check
from srv_cpu import op_specs
from srv_cpu.op_specs import DISTRIBUTIONS, mismatch


@dataclass(frozen=True, slots=True)
class Extension:
    """A package: its distribution, its module, and its operators that srv calls, by their full names."""

    distribution: str
    module: str
    operators: tuple[str, ...]

    def mismatch(self, installed: Mapping[str, str]) -> str | None:
        """Why it is not for this torch, by their versions; None if it is."""
        return mismatch(self.distribution, installed)

    def unusable(self) -> str | None:
        """Why it cannot be used here, or None, after importing it."""
        return self.mismatch(versions(self.distribution, "torch")) or _load(self)

    def check(self) -> Check | None:
        """A line of the doctor: whether an installed package is used; None if it is not installed."""
        version = versions(self.distribution).get(self.distribution)
        if version is None:
            return None
        reason = self.unusable()
        if reason is None:
            return Check(self.distribution, True, f"{version}, after the native kernels: {', '.join(self.operators)}")
        remedy = f"Install the {self.distribution} for this torch, or uninstall it; srv needs neither."
        return Check(self.distribution, False, f"not used: {reason}", remedy)


ZENTORCH = Extension(
    DISTRIBUTIONS[op_specs.ZENTORCH],
    "zentorch",
    (
        "zentorch::zentorch_linear_unary",
        "zentorch::zentorch_weight_prepack_for_linear",
        "zentorch::zentorch_rms_norm",
    ),
)
IPEX = Extension(DISTRIBUTIONS[op_specs.IPEX], "intel_extension_for_pytorch", ("torch_ipex::rmsnorm",))


@functools.cache
def _load(extension: Extension) -> str | None:
    try:
        importlib.import_module(extension.module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{extension.distribution} cannot be loaded: {type(error).__name__}: {error}"
    for name in extension.operators:
        namespace, _, operator = name.partition("::")
        if not hasattr(getattr(torch.ops, namespace), operator):
            return f"{extension.distribution} has no operator {name}"
    return None


class ZentorchLinear:
    """y = x Wᵀ + b over a packed copy of W.

    Called with a plain weight, the operator would reorder it in place (as of 2.13.0.2), under whoever else reads it.
    """

    __slots__ = ("_bias", "_linear", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.zentorch.zentorch_weight_prepack_for_linear(weight.detach())
        self._bias = bias
        self._linear = torch.ops.zentorch.zentorch_linear_unary.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._weight, self._bias, is_weight_prepacked=True)


def zentorch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `srv_kernels.contracts`."""
    return torch.ops.zentorch.zentorch_rms_norm(x.contiguous(), weight, eps)


def zentorch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `srv_kernels.contracts`."""
    total = residual + x
    return zentorch_rms_norm(total, weight, eps), total


def ipex_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `srv_kernels.contracts`."""
    return torch.ops.torch_ipex.rmsnorm(x.contiguous(), weight, eps)


def ipex_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `srv_kernels.contracts`."""
    total = residual + x
    return ipex_rms_norm(total, weight, eps), total

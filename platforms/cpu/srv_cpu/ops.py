"""The ops of processors in a worker: the implementations that `srv_cpu.op_specs` lists, asked about this machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from srv.platform.facts import DeviceFacts
from srv.platform.host import versions
from srv.platform.interface import OpArgs, OpImpl
from srv.platform.ops import implementations
from srv_cpu import op_specs
from srv_cpu.extensions import IPEX, ZENTORCH, Extension
from srv_kernels.cpu.library import load

NATIVE_FLOATS = (torch.float32, torch.bfloat16)
_EXTENSIONS = {op_specs.ZENTORCH: ZENTORCH, op_specs.IPEX: IPEX}


def _this_machine() -> DeviceFacts:
    """What the specs ask about; whether the native library loads is known here, even if it was not to the probe."""
    features = (op_specs.NATIVE_KERNELS,) if load().library is not None else ()
    return DeviceFacts("", 1, 1, versions=versions("torch", *op_specs.DISTRIBUTIONS.values()), features=features)


def _loading(impl: OpImpl, extension: Extension) -> OpImpl:
    """The specs know the versions of a package; whether it loads is known only here."""

    def supports(args: OpArgs) -> str | None:
        return impl.supports_args(args) or extension.unusable()

    return replace(impl, supports_args=supports)


OPS = tuple(
    _loading(impl, _EXTENSIONS[impl.name]) if impl.name in _EXTENSIONS else impl
    for impl in implementations(op_specs.OPS, _this_machine())
)

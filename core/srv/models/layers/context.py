"""The context in which layers are built: the device, the dtype and the platform's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from srv.platform.interface import OpArgs
from srv.platform.ops import Ops


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The device and dtype that layers are built for, and the ops that they call."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter for a loader to fill; `dtype` defaults to the model's."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=dtype or self.dtype), requires_grad=False)

    def bind(self, op: str, **sizes: int) -> Callable[..., Tensor]:
        """The platform's implementation of an op for the model's dtype and these sizes."""
        return self.ops.bind(op, OpArgs(self.dtype, sizes))

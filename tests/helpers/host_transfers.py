"""Copies of a platform that computes in host memory, for tests of parts that need no other member of a platform."""

from __future__ import annotations

import torch

from srv.platform.streams import Streams, host_streams
from srv.platform.transfers import Transfers


class HostMemory:
    """The members of a platform that copies need, where host memory is device memory."""

    def streams(self, device: torch.device) -> Streams:
        return host_streams()

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


HOST_TRANSFERS = Transfers(HostMemory(), torch.device("cpu"))

"""The placeholder for the device code of the NVIDIA CUDA platform, which is not implemented yet."""

from __future__ import annotations

from srv.platform.placeholder import PlatformPlaceholder

PLACEHOLDER = PlatformPlaceholder("cuda", "NVIDIA CUDA", "srv_cuda.placeholder:create")
create = PLACEHOLDER.create

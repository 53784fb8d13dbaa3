"""Stands where the NVIDIA CUDA platform's device code will be."""

from __future__ import annotations

from srv.platform.placeholder import PlatformPlaceholder

PLACEHOLDER = PlatformPlaceholder("cuda", "NVIDIA CUDA", "srv_cuda.placeholder:create")
create = PLACEHOLDER.create

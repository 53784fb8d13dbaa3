"""Stands where the NVIDIA CUDA platform's device code will be."""

from __future__ import annotations

from srv.platform.unbuilt import Unbuilt

UNBUILT = Unbuilt("cuda", "NVIDIA CUDA", "srv_cuda.unbuilt:create")
create = UNBUILT.create

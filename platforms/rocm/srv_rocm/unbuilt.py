"""Stands where the AMD ROCm platform's device code will be."""

from __future__ import annotations

from srv.platform.unbuilt import Unbuilt

UNBUILT = Unbuilt("rocm", "AMD ROCm", "srv_rocm.unbuilt:create")
create = UNBUILT.create

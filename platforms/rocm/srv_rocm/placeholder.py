"""Stands where the AMD ROCm platform's device code will be."""

from __future__ import annotations

from srv.platform.placeholder import PlatformPlaceholder

PLACEHOLDER = PlatformPlaceholder("rocm", "AMD ROCm", "srv_rocm.placeholder:create")
create = PLACEHOLDER.create

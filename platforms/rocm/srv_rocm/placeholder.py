"""The placeholder for the device code of the AMD ROCm platform, which is not implemented yet."""

from __future__ import annotations

from srv.platform.placeholder import PlatformPlaceholder

PLACEHOLDER = PlatformPlaceholder("rocm", "AMD ROCm", "srv_rocm.placeholder:create")
create = PLACEHOLDER.create

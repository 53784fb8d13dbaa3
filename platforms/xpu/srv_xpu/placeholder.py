"""The placeholder for the device code of the Intel XPU platform, which is not implemented yet."""

from __future__ import annotations

from srv.platform.placeholder import PlatformPlaceholder

PLACEHOLDER = PlatformPlaceholder("xpu", "Intel XPU", "srv_xpu.placeholder:create")
create = PLACEHOLDER.create

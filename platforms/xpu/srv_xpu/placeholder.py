"""Stands where the Intel XPU platform's device code will be."""

from __future__ import annotations

from srv.platform.placeholder import PlatformPlaceholder

PLACEHOLDER = PlatformPlaceholder("xpu", "Intel XPU", "srv_xpu.placeholder:create")
create = PLACEHOLDER.create

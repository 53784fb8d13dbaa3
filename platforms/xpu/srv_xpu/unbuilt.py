"""Stands where the Intel XPU platform's device code will be."""

from __future__ import annotations

from srv.platform.unbuilt import Unbuilt

UNBUILT = Unbuilt("xpu", "Intel XPU", "srv_xpu.unbuilt:create")
create = UNBUILT.create

"""Stands where the Ascend NPU platform's device code will be."""

from __future__ import annotations

from srv.platform.unbuilt import Unbuilt

UNBUILT = Unbuilt("npu", "Ascend NPU", "srv_npu.unbuilt:create")
create = UNBUILT.create

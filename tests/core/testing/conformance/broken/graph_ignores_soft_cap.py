"""Captured steps are wrong in layers with capped scores.

Caught by graph.traits at L2, naming "soft_cap".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_ignores_soft_cap", attention="graph_ignores_soft_cap:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.captured and call.layer.soft_cap is not None

"""A captured step is wrong if three query heads share a KV head.

Caught by graph.gqa at L2, naming "9/3 heads".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_three_heads_a_group", attention="graph_three_heads_a_group:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.captured and call.sharing == 3

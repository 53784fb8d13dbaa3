"""Captured steps of more than 64 rows are wrong if query heads share KV heads.

Caught by graph.gqa at L2, naming "replay of 72 rows with 72 requests".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_many_rows_of_shared_heads", attention="graph_many_rows_of_shared_heads:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.captured and call.sharing > 1 and len(call.batch.kv_lens) > 64

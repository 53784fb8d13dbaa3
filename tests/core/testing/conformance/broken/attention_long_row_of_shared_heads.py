"""Attention is wrong for a long row among many, if query heads share KV heads.

Caught by attention.mixed at L2, naming "one of 600 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_long_row_of_shared_heads", attention="attention_long_row_of_shared_heads:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.sharing > 1 and len(call.batch.kv_lens) > 64 and max(call.batch.kv_lens) > 256

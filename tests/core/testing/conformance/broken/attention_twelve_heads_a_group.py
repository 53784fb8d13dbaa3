"""Attention is wrong if twelve query heads share a KV head.

Caught by attention.gqa at L2, naming "12/1 heads".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_twelve_heads_a_group", attention="attention_twelve_heads_a_group:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.sharing == 12

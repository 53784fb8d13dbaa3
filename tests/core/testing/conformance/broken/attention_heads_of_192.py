"""Attention is wrong if a head has 192 elements.

Caught by attention.head_dims at L2, naming "heads of 192".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_heads_of_192", attention="attention_heads_of_192:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.layer.head_dim == 192

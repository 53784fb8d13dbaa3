"""Attention is wrong in pages of 64 tokens.

Caught by attention.page_boundaries at L2, naming "pages of 64".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_pages_of_64", attention="attention_pages_of_64:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.layout.page_size == 64

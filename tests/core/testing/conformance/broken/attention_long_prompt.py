"""Attention is wrong in prompts of more than 1,024 tokens.

Caught by attention.long_rows at L2, naming "a prompt of 1200 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_long_prompt", attention="attention_long_prompt:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return max(call.batch.query_lens) > 1024

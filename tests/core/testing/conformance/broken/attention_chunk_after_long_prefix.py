"""A chunk of more than 32 tokens is wrong after a prefix of more than 256.

Caught by attention.extend at L2, naming "a chunk of 37 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_chunk_after_long_prefix", attention="attention_chunk_after_long_prefix:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return any(
        new > 32 and length - new > 256 for new, length in zip(call.batch.query_lens, call.batch.kv_lens, strict=True)
    )

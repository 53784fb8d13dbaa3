"""Attention is wrong in steps of more than 32 rows.

Caught by attention.mixed at L2, naming "a step of 72 rows".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_many_rows", attention="attention_many_rows:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return len(call.batch.query_lens) > 32

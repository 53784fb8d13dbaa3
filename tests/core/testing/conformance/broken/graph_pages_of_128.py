"""A captured step is wrong in pages of 128 tokens.

Caught by graph.lengths at L2, naming "pages of 128".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("graph_pages_of_128", attention="graph_pages_of_128:attention")


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.captured and call.layout.page_size == 128

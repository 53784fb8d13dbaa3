"""Attention is wrong in pages of the default size of the plugin, which is none of the kit's own.

Caught by attention.page_boundaries at L2, naming "pages of 48".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_attention import Call, wrong_where
from toy_variant import manifest

from srv.platform.facts import Default, ResolutionContext
from srv_toy_device.facts import FACTS

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext


def page_size(context: ResolutionContext) -> int:
    return 48


MANIFEST = manifest(
    "attention_own_page_size",
    attention="attention_own_page_size:attention",
    facts={"defaults": (*FACTS.defaults, Default("page_size", page_size, "its pages have 48 tokens"))},
)


def attention(context: BackendContext) -> Any:
    return wrong_where(context, wrong)


def wrong(call: Call) -> bool:
    return call.layout.page_size == 48

"""Reads look up the page of the next token, which is wrong for the last token of a page.

Caught by attention.several_pages at L2, naming "over several pages".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_off_by_one_page", attention="attention_off_by_one_page:attention")


def attention(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.attention import ToyPagedAttention

    class OffByOne(ToyPagedAttention):
        def _slots(self, page_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            if positions.dim() == 1:  # the step's own tokens are written where they belong
                return super()._slots(page_table, rows, positions)
            columns = ((positions + 1) // self._page_size).clamp(max=page_table.shape[1] - 1)  # the fault
            pages = page_table[rows, columns].to(torch.int64)
            return pages * self._page_size + positions % self._page_size

    return OffByOne(context)

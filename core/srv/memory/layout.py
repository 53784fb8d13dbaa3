"""What a KV pool looks like: the seam between core (addressing) and attention backends (reading).

Torch-free. Page ids of a group run from 1 to `pages`; page 0 takes the writes of padded rows and is in
no count, so a pool allocates `pages + 1` pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from srv.args.rules.reserve import item_size
from srv.models.facts import CacheGroup

SCALE_BYTES = 4  # of int8: a float32 for one token's key or value of one head


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and type of the KV pool of one cache group.

    `order` names the axes of one layer's key (and value) buffer; "page_token_head" is
    ``[pages + 1, page_size, kv_heads, head_dim]``, contiguous, and "page_token_flat" is
    ``[pages + 1, page_size, kv_heads * head_dim]``. Backends of one server must agree on it.
    `dtype` is a torch dtype's name ("bfloat16"). "int8" stands for integers times a scale, a float32 for each token's
    key (or value) of a head: 1/127 of its largest magnitude. The scales lie in the same buffers, at a place that the
    order says; the two orders above have none.
    """

    group: CacheGroup
    page_size: int
    dtype: str
    order: str = "page_token_head"

    def bytes_per_page(self) -> int:
        """Bytes that one page takes over all layers of the group, keys and values together, with what scales them."""
        group = self.group
        numbers = group.key_dim + group.value_dim
        a_token = numbers + 2 * SCALE_BYTES if self.dtype == "int8" else numbers * item_size(self.dtype)
        return len(group.layers) * self.page_size * group.kv_heads * a_token

"""What a KV pool looks like: the seam between core (addressing) and attention backends (reading).

Torch-free. Page ids of a group run from 1 to `pages`; page 0 takes the writes of padded rows and is in
no count, so a pool allocates `pages + 1` pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from srv.models.facts import CacheGroup


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and type of the KV pool of one cache group.

    `order` names the axes of one layer's key (and value) buffer; "page_token_head" is
    ``[pages + 1, page_size, kv_heads, head_dim]``, contiguous, and "page_token_flat" is
    ``[pages + 1, page_size, kv_heads * head_dim]``. Backends of one server must agree on it.
    `dtype` is a torch dtype's name ("bfloat16").
    """

    group: CacheGroup
    page_size: int
    dtype: str
    order: str = "page_token_head"

    def bytes_per_page(self, itemsize: int) -> int:
        """Bytes that one page takes over all layers of the group, keys and values together."""
        group = self.group
        return len(group.layers) * self.page_size * group.kv_heads * (group.key_dim + group.value_dim) * itemsize

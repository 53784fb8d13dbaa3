"""The words in which a platform says what its devices can do, and core asks. Torch-free.

The vocabulary is closed: a misspelt capability would silently switch an argument off, so a word that is
not listed here is refused when the plugin loads. A new word comes with its first reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "paged_kv": "the KV pool is addressed through page tables, with a page size of the user's choice",
        "prefix_cache": "attention reads pages that another request wrote, so that prefixes can be shared",
        "chunked_prefill": "attention extends a context that is partly in the KV pool already",
        "host_memory": "the device computes in the host's own memory, which it shares with everything else there",
        "overlap": "the host may plan the next step while the device computes one",
        "graphs": "a captured step can be replayed with new host lengths",
        "w8a8": "weights of 8-bit integers, times activations rounded to 8 bits: ops linear_w8a8, linear_w8a8_static",
        "int8_weights": "weights of 8-bit integers, times activations as they are: op linear_int8",
        "gguf_blocks": "weights in the blocks of GGUF files, multiplied as they are: ops linear_gguf, rows_gguf",
        "int8_kv": "a KV pool of 8-bit integers with room for their scales, and attention that reads it: see KVLayout",
        "float32": "weights, activations and KV pool in float32",
        "float16": "weights, activations and KV pool in float16",
        "bfloat16": "weights, activations and KV pool in bfloat16",
    }
)

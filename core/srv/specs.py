"""Plain data that platforms, models and memory share: facts about a model, and the layout of its KV pool.

Torch-free, so that `srv plan` answers at once on a laptop. `srv.models.read` fills the facts from `config.json` or the
GGUF header before any weight is read; they do not change afterwards. `KVLayout` is the seam between core, which
addresses pages, and attention backends, which read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from srv.dtypes import item_size

SCALE_BYTES = 4  # in an int8 pool: one float32 per token and KV head, for the key and for the value


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one page table: their kind of state and its size per token.

    kind: "full" (keys and values of every earlier token). So far every model has exactly one "full" group; layers with
    a sliding window belong to it as well, and their attention masks what is outside the window.
    """

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelFacts:
    """Facts about one model.

    `format`: "gguf", "safetensors" or "config" (a configuration without weights, for `--load-format dummy`). `path`:
    the absolute path of the file or folder. `architecture`: the Hugging Face class name, e.g. "LlamaForCausalLM".
    `config`: the fields of the Hugging Face configuration; those of GGUF files are translated. `dtype`: the torch name
    of the checkpoint's own dtype (for a quantized GGUF file "float16", the type of its scales). `quantization`: the
    name of the method ("gguf:Q4_1"), or None. `context_length` in tokens. `parameters`: their number, and
    `stored_types`: how many of them are stored in each dtype, or in each type of a GGUF file; {} without weights.
    `weight_bytes`: the size of the weights on disk. `column_block`: in a GGUF file, the columns of o_proj and down_proj
    can be divided at its multiples (the elements per quantization block). `end_tokens`: the ids of the tokens that end
    a generation. `pooling`: how embeddings are pooled according to the checkpoint ("last", "mean", or a mode of
    sentence-transformers that srv does not support), or None.
    """

    name: str
    path: str
    format: str
    architecture: str
    config: Mapping[str, Any]
    dtype: str
    quantization: str | None
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    parameters: int
    weight_bytes: int
    cache_groups: tuple[CacheGroup, ...]
    end_tokens: tuple[int, ...] = ()
    stored_types: Mapping[str, int] = field(default_factory=dict)
    pooling: str | None = None
    column_block: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of the KV pool of one cache group.

    The page ids of a group run from 1 to `pages`. Page 0 takes the writes of padded rows and is not counted, so a pool
    allocates `pages + 1` pages.

    `order` names the axes of one layer's key (and value) buffer: "page_token_head" is
    ``[pages + 1, page_size, kv_heads, head_dim]``, contiguous, and "page_token_flat" is
    ``[pages + 1, page_size, kv_heads * head_dim]``. All backends of one server must use the same order.
    `dtype` is the name of a torch dtype ("bfloat16"). With "int8", a key (or value) of one token and KV head is stored
    as integers and one float32 scale, 1/127 of its largest magnitude. The scales are in the same buffers, where the
    order defines it; the two orders above define no such place.
    """

    group: CacheGroup
    page_size: int
    dtype: str
    order: str = "page_token_head"

    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers of the group: keys, values and their scales."""
        group = self.group
        elements = group.key_dim + group.value_dim
        head_bytes = elements + 2 * SCALE_BYTES if self.dtype == "int8" else elements * item_size(self.dtype)
        return len(group.layers) * self.page_size * group.kv_heads * head_bytes

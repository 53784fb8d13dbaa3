"""Plain data that platforms, models and memory share: facts about a model, and the layout of its KV pool.

Torch-free, so that `srv plan` answers at once on a laptop. `srv.models.read` fills the facts from `config.json` or the
GGUF header before any weight is read; they do not change afterwards. `KVLayout` is the seam between core, which
addresses pages, and attention backends, which read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from srv.dtypes import item_size

LAYER_TRAITS = ("window", "soft_cap")
"""What a layer may need beyond causal attention; names for `AttentionLayer.traits` and `BackendSpec.traits`."""

SCALE_BYTES = 4  # in an int8 pool: one float32 per token and KV head, for the key and for the value


class FullAttention(msgspec.Struct, frozen=True, tag="full"):
    """A cache group: the layers `layers` of a model, which share one page table and keep every token.

    They store a key of `key_dim` and a value of `value_dim` elements per token and KV head. Layers with a sliding
    window may belong to such a group as well: their attention masks what is outside the window.
    """

    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: None = None


class SlidingWindow(msgspec.Struct, frozen=True, tag="window"):
    """A cache group as above, of layers in which a token attends to itself and the `window - 1` tokens before it.

    Pages behind the window are freed, so their entries in a page table may be 0 or belong to other requests.
    """

    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int


CacheSpec: TypeAlias = FullAttention | SlidingWindow


def attention_groups(
    windows: Sequence[int | None], kv_heads: int, key_dim: int, value_dim: int, context_length: int
) -> tuple[CacheSpec, ...]:
    """The cache groups of a model whose layers have these windows: full attention first, then the shortest window.

    A window that is not shorter than the context frees nothing, so its layers belong to the group of full attention.
    """
    layers: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window if window is not None and window < context_length else 0, []).append(layer)
    sizes = (kv_heads, key_dim, value_dim)
    return tuple(
        SlidingWindow(tuple(layers[window]), *sizes, window) if window else FullAttention(tuple(layers[0]), *sizes)
        for window in sorted(layers)
    )


def single_pool(groups: Sequence[CacheSpec]) -> FullAttention:
    """One group with all layers of `groups`, which have equal sizes; attention masks what is outside a window."""
    first = groups[0]
    layers = tuple(sorted(layer for group in groups for layer in group.layers))
    return FullAttention(layers, first.kv_heads, first.key_dim, first.value_dim)


def cache_places(groups: Sequence[CacheSpec]) -> dict[int, tuple[int, int]]:
    """For each layer of the model, its cache group and its index within the group."""
    return {layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)}


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The properties of one attention layer that a backend needs; `index` counts within its cache group, `group`.

    With tensor parallelism, the heads are those of one rank. `scale` multiplies q.k. `window`: None for full attention,
    otherwise a token attends to itself and the `window - 1` tokens before it. `soft_cap`: None, or scores become
    soft_cap * tanh(scores / soft_cap).
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    group: int = 0

    def traits(self) -> dict[str, str]:
        """What this layer needs of `LAYER_TRAITS`, each with a noun phrase: {"soft_cap": "a soft cap of 50.0"}."""
        found: dict[str, str] = {}
        if self.window is not None:
            found["window"] = f"a sliding window of {self.window} tokens"
        if self.soft_cap is not None:
            found["soft_cap"] = f"a soft cap of {self.soft_cap}"
        return found


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
    cache_groups: tuple[CacheSpec, ...]
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

    group: CacheSpec
    page_size: int
    dtype: str
    order: str = "page_token_head"

    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers of the group: keys, values and their scales."""
        group = self.group
        elements = group.key_dim + group.value_dim
        head_bytes = elements + 2 * SCALE_BYTES if self.dtype == "int8" else elements * item_size(self.dtype)
        return len(group.layers) * self.page_size * group.kv_heads * head_bytes

"""Plain data that platforms, models and memory share: facts about a model, and the layouts of its cache pools.

Torch-free, so that `srv plan` answers at once on a laptop. `srv.models.read` fills the facts from `config.json` or the
GGUF header before any weight is read; they do not change afterwards. `KVLayout` is the seam between core, which
addresses pages, and attention backends, which read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, assert_never

import msgspec

from srv.dtypes import ITEM_SIZES, item_size
from srv.errors import InternalError

LAYER_TRAITS = ("window", "soft_cap")
"""What a layer may need beyond causal attention; names for `AttentionLayer.traits` and `BackendSpec.traits`."""

SCALE_BYTES = 4  # in an int8 pool: one float32 per stored vector (the key of one token and KV head, for example)


def _vector_bytes(elements: int, dtype: str) -> int:
    """Bytes of one vector that is stored per token; with int8, its scale is included."""
    return elements + SCALE_BYTES if dtype == "int8" else elements * item_size(dtype)


class _PerHead(msgspec.Struct, frozen=True):
    """The sizes of a group whose layers store a key and a value per token and KV head."""

    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token over all layers of the group, for a pool of this dtype."""
        head = _vector_bytes(self.key_dim, dtype) + _vector_bytes(self.value_dim, dtype)
        return len(self.layers) * self.kv_heads * head


class FullAttention(_PerHead, frozen=True, tag="full"):
    """A cache group: the layers `layers` of a model, which share one page table and keep every token.

    They store a key of `key_dim` and a value of `value_dim` elements per token and KV head. Layers with a sliding
    window may belong to such a group as well: their attention masks what is outside the window.
    """

    window: None = None


class SlidingWindow(_PerHead, frozen=True, tag="window"):
    """A cache group as above, of layers in which a token attends to itself and the `window - 1` tokens before it.

    Pages behind the window are freed, so their entries in a page table may be 0 or belong to other requests.
    """

    window: int


class Latent(msgspec.Struct, frozen=True, tag="latent"):
    """A cache group of layers with multi-head latent attention, which share one page table and keep every token.

    Per token, a layer stores a compressed vector of `latent_dim` elements, from which the keys and values of all heads
    follow, and one rotary key of `rope_dim` elements that all heads share.
    """

    layers: tuple[int, ...]
    latent_dim: int
    rope_dim: int
    window: None = None

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token over all layers of the group, for a pool of this dtype."""
        return len(self.layers) * (_vector_bytes(self.latent_dim, dtype) + _vector_bytes(self.rope_dim, dtype))


class StateTensor(msgspec.Struct, frozen=True):
    """A state that one layer keeps per request: its name, its shape, and the torch name of its dtype.

    Raises ValueError for a dtype that is not a key of `srv.dtypes.ITEM_SIZES`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"state {self.name} has dtype {self.dtype}, which is not one of {', '.join(ITEM_SIZES)}")

    def size(self) -> int:
        """Bytes of the state of one layer and one request."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Recurrent(msgspec.Struct, frozen=True, tag="recurrent"):
    """A cache group of recurrent layers: each keeps `states` per request, however many tokens the request has.

    The group has no pages and no page table. A request has one slot, with the states of all layers.
    Raises ValueError if two states have the same name.
    """

    layers: tuple[int, ...]
    states: tuple[StateTensor, ...]

    def __post_init__(self) -> None:
        names = [state.name for state in self.states]
        if len(set(names)) < len(names):
            raise ValueError(f"two states of a layer have the same name: {', '.join(names)}")

    def bytes_per_slot(self) -> int:
        """Bytes of the states of one request over all layers of the group."""
        return len(self.layers) * sum(state.size() for state in self.states)


AttentionSpec: TypeAlias = FullAttention | SlidingWindow  # a key and a value per token and KV head
PagedSpec: TypeAlias = AttentionSpec | Latent  # memory per token, in pages
CacheSpec: TypeAlias = PagedSpec | Recurrent  # closed: whoever distinguishes them handles all, or refuses by name


def attention_specs(groups: Sequence[CacheSpec]) -> tuple[AttentionSpec, ...]:
    """The groups with a key and a value per token and KV head.

    An attention backend is never asked about a model that has others: core refuses it first.
    """
    return tuple(group for group in groups if isinstance(group, AttentionSpec))


def attention_groups(
    windows: Sequence[int | None], kv_heads: int, key_dim: int, value_dim: int, context_length: int
) -> tuple[AttentionSpec, ...]:
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


def single_pool(groups: Sequence[CacheSpec]) -> tuple[CacheSpec, ...]:
    """The groups with all attention layers in one, if these have equal sizes; attention masks what is outside a window.

    Groups of other kinds stay as they are, after it.
    """
    heads = attention_specs(groups)
    if not heads:
        return tuple(groups)
    layers = tuple(sorted(layer for group in heads for layer in group.layers))
    merged = FullAttention(layers, heads[0].kv_heads, heads[0].key_dim, heads[0].value_dim)
    return (merged, *(group for group in groups if not isinstance(group, AttentionSpec)))


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


PLAIN_ORDERS = ("page_token_head", "page_token_flat")


def spec_name(spec: CacheSpec) -> str:
    """The name of a cache spec in messages, which is its tag: "full", "window", "latent" or "recurrent"."""
    return str(spec.__struct_config__.tag)


class TensorShape(NamedTuple):
    """Shape and dtype (its torch name) of one tensor of a pool."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Names, shapes and dtypes of the tensors in the pool of one cache group: one tensor per name and layer.

    | group | names | plain tensor of one layer |
    |---|---|---|
    | attention, `order` "page_token_head" | "key", "value" | ``[pages + 1, page_size, kv_heads, dim]`` |
    | attention, `order` "page_token_flat" | "key", "value" | ``[pages + 1, page_size, kv_heads * dim]`` |
    | `Latent` | "latent", "rope" | ``[pages + 1, page_size, dim]`` |
    | `Recurrent` | those of `states` | ``[slots + 1, *state.shape]`` |

    All are contiguous. The page ids of a group run from 1 to `pages`, the slots of a recurrent one from 1 to `slots`.
    Page 0 and slot 0 take the writes of padded rows and are not counted.

    `order` names the axes of keys and values. A platform's own order is any other name, and defines its shapes. All
    backends of one server must use the same order. It says nothing about `Latent` and `Recurrent`, which have no heads.
    `dtype` is the name of a torch dtype ("bfloat16"); states have dtypes of their own, and `page_size` does not concern
    them. With "int8", a vector (the key of one token and KV head, for example) is stored as integers and one float32
    scale, 1/127 of its largest magnitude. The scales are in the same tensors, where a platform's own order defines it;
    plain tensors have no such place.
    """

    group: CacheSpec
    page_size: int
    dtype: str
    order: str = "page_token_head"

    def names(self) -> tuple[str, ...]:
        """The names of the tensors of one layer."""
        match self.group:
            case FullAttention() | SlidingWindow():
                return "key", "value"
            case Latent():
                return "latent", "rope"
            case Recurrent(states=states):
                return tuple(state.name for state in states)
            case _ as never:
                assert_never(never)

    def plain_tensors(self, pages: int) -> dict[str, TensorShape]:
        """For each name, the plain tensor of one layer in a pool of `pages` pages (slots of a recurrent group).

        Raises InternalError for an order that is not plain, and for int8.
        """
        group, axes = self.group, (pages + 1, self.page_size)
        if not isinstance(group, Recurrent) and self.dtype == "int8":
            raise InternalError(f"plain tensors of a {spec_name(group)} cache group have no place for int8 scales")
        match group:
            case FullAttention() | SlidingWindow():
                dims = {"key": group.key_dim, "value": group.value_dim}
                heads = {name: self._heads(group.kv_heads, dim) for name, dim in dims.items()}
                return {name: TensorShape((*axes, *last), self.dtype) for name, last in heads.items()}
            case Latent():
                dims = {"latent": group.latent_dim, "rope": group.rope_dim}
                return {name: TensorShape((*axes, dim), self.dtype) for name, dim in dims.items()}
            case Recurrent():
                return {state.name: TensorShape((pages + 1, *state.shape), state.dtype) for state in group.states}
            case _ as never:
                assert_never(never)

    def _heads(self, kv_heads: int, dim: int) -> tuple[int, ...]:
        match self.order:
            case "page_token_head":
                return kv_heads, dim
            case "page_token_flat":
                return (kv_heads * dim,)
            case _:
                raise InternalError(f"{self.order} is not a plain order: {' or '.join(PLAIN_ORDERS)}")

    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers of the group, scales included.

        Raises InternalError for a recurrent group, which has slots: see `Recurrent.bytes_per_slot`.
        """
        if isinstance(self.group, Recurrent):
            raise InternalError("a recurrent cache group has no pages")
        return self.page_size * self.group.bytes_per_token(self.dtype)

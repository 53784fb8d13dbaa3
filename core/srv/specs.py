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

from srv.dtypes import ITEM_SIZES, KVScales, item_size
from srv.errors import InternalError
from srv.latent_dims import IndexDims as IndexDims  # part of this interface
from srv.latent_dims import LatentDims as LatentDims
from srv.types import PooledHead

LAYER_TRAITS = (
    *("window", "soft_cap", "sinks", "chunks", "alibi", "bidirectional", "indexer", "relative_bias"),
    "temperature",
)
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
    follow, and one rotary key of `rope_dim` that all heads share; the layers `indexed` also an index key (`IndexDims`).
    """

    layers: tuple[int, ...]
    latent_dim: int
    rope_dim: int
    window: None = None
    index_dim: int = 0
    indexed: tuple[int, ...] = ()

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token over all layers of the group, for a pool of this dtype."""
        vectors = _vector_bytes(self.latent_dim, dtype) + _vector_bytes(self.rope_dim, dtype)
        return len(self.layers) * vectors + len(self.indexed) * _vector_bytes(self.index_dim, dtype)


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
    """The groups with a key and a value per token and KV head."""
    return tuple(group for group in groups if isinstance(group, AttentionSpec))


def single_pool(groups: Sequence[CacheSpec]) -> tuple[CacheSpec, ...]:
    """The groups with all attention layers in one, if these have equal sizes; attention masks what is outside a window.

    Groups of other kinds stay as they are, after it.
    """
    heads = attention_specs(groups)
    if len({(group.kv_heads, group.key_dim, group.value_dim) for group in heads}) != 1:
        return tuple(groups)
    layers = tuple(sorted(layer for group in heads for layer in group.layers))
    merged = FullAttention(layers, heads[0].kv_heads, heads[0].key_dim, heads[0].value_dim)
    return (merged, *(group for group in groups if not isinstance(group, AttentionSpec)))


def cache_places(groups: Sequence[CacheSpec]) -> dict[int, tuple[int, int]]:
    """For each layer of the model, its cache group and its index within the group."""
    return {layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)}


LATENT = "latent"  # a key of `AttentionLayer.traits`; a backend has it by `BackendSpec.latent`


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The properties of one attention layer that a backend needs; `index` counts within its cache group, `group`.

    With tensor parallelism, the heads are those of one rank. `scale` multiplies q.k. `window`: None for full attention,
    otherwise a token attends to itself and the `window - 1` tokens before it. `soft_cap`: None, or scores become
    soft_cap * tanh(scores / soft_cap). `sinks`: each head has a learned score that takes part in the softmax and has no
    value. `chunk`: None, or a token attends only to tokens of its own chunk of so many positions. `alibi`: None, or the
    slope of each head (ALiBi, Press et al. 2022, arXiv:2108.12409): slope * (position of the key - position of the
    query), which is at most 0, is added to the scaled score. `sink_scores`: those of `sinks`, of each head; None before
    weights are loaded. `latent`: None, or the sizes of latent attention, whose cache group is `Latent`; then `head_dim`
    is `key_dim` + `rope_dim`, and `kv_heads` is 1. `indexer`: None, or how the keys of a query are chosen, in layers of
    latent attention. `bidirectional`: a token also attends to the tokens after it, the
    `window - 1` next ones if there is a window. Such a layer has no place in a pool: all tokens of a sequence are rows
    of one step, with their keys and values. `relative_bias`: learned numbers are added to the scores, by head and by
    the distance of key and query. `bias_values`: for each head those of the distances -D to D, of which the ends are
    those of greater distances; None before weights are loaded. `temperature_from`: None, or a position n beyond
    which attention sharpens: scores of a query at position p > n, after the soft cap, are multiplied by ln(p) / ln(n).
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    group: int = 0
    sinks: bool = False
    chunk: int | None = None
    alibi: tuple[float, ...] | None = None
    sink_scores: tuple[float, ...] | None = None
    latent: LatentDims | None = None
    bidirectional: bool = False
    indexer: IndexDims | None = None
    relative_bias: bool = False
    bias_values: tuple[tuple[float, ...], ...] | None = None
    temperature_from: int | None = None

    def result_dim(self, values: int) -> int:
        """The elements per head of the result of attention; `values`: the last axis of its third operand."""
        return values if self.latent is None else self.latent.value_dim

    def traits(self) -> dict[str, str]:
        """What this layer needs of `LAYER_TRAITS` and `LATENT`, with a noun phrase: {"sinks": "attention sinks"}."""
        traits: dict[str, str] = {}
        if self.window is not None:
            traits["window"] = f"a sliding window of {self.window} tokens"
        if self.soft_cap is not None:
            traits["soft_cap"] = f"a soft cap of {self.soft_cap}"
        if self.sinks:
            traits["sinks"] = "attention sinks"
        if self.chunk is not None:
            traits["chunks"] = f"attention within chunks of {self.chunk} tokens"
        if self.alibi is not None:
            traits["alibi"] = "linear position biases (ALiBi)"
        if self.latent is not None:
            traits[LATENT] = "multi-head latent attention (MLA)"
        if self.indexer is not None:
            traits["indexer"] = "keys chosen by an indexer (sparse attention)"
        if self.bidirectional:
            traits["bidirectional"] = "attention to later tokens"
        if self.relative_bias:
            traits["relative_bias"] = "learned biases by distance"
        if self.temperature_from is not None:
            traits["temperature"] = f"scores that grow with the position beyond {self.temperature_from}"
        return traits


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
    a generation. `pooling`: how hidden states are pooled according to the checkpoint (a value of `srv.types.Pooling`,
    or several modes of sentence-transformers joined by "+"), or None. `text_part_of`: the class of the vision model
    whose language model these facts describe, or None. `overrides`: the fields of `config` that the user replaced.
    `remote_code`: whether Python code in its folder may be run. `generates`: it generates text; if not, its hidden
    states are pooled. `head`: what follows pooling. `untied`: its output layer is stored and differs from the embedding
    that its configuration ties it to; `config` does not tie them then. `headless`: its configuration names a class with
    an output layer, which is not stored; `architecture` is the class without it. `assumes_dtype`: neither weights nor
    the configuration state `dtype`, which is what such checkpoints usually have.

    Without weights, `parameters`, `weight_bytes` and, of quantized models, `stored_types` follow from the
    configuration, if the sizes of the architecture are known; `unknown_sizes` is a clause that says why they are not,
    and `parameters` may be None. `active_parameters`: those that take part in computing one token, if known.
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
    parameters: int | None
    weight_bytes: int
    cache_groups: tuple[CacheSpec, ...]
    end_tokens: tuple[int, ...] = ()
    stored_types: Mapping[str, int] = field(default_factory=dict)
    pooling: str | None = None
    column_block: int = 1
    text_part_of: str | None = None
    active_parameters: int | None = None
    unknown_sizes: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    remote_code: bool = False
    generates: bool = True
    head: PooledHead = PooledHead()  # noqa: RUF009 - immutable
    untied: bool = False
    headless: bool = False
    assumes_dtype: bool = False

    @property
    def has_pool(self) -> bool:
        """Whether its layers keep keys, values or states; those of an encoder do not."""
        return not self.cache_groups or any(group.layers for group in self.cache_groups)

    @property
    def latents(self) -> tuple[Latent, ...]:
        """The cache groups of latent attention (MLA)."""
        return tuple(group for group in self.cache_groups if isinstance(group, Latent))

    def counted_parameters(self) -> int:
        """The number of parameters. Raises InternalError if it is not known; callers ask for `unknown_sizes` before."""
        if self.parameters is None:
            raise InternalError(f"the number of parameters of {self.name} is not known: {self.unknown_sizes}")
        return self.parameters


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
    """Names, shapes and dtypes of the tensors in the pool of one cache group: one per name and layer that has it.

    | group | names | plain tensor of one layer |
    |---|---|---|
    | attention, `order` "page_token_head" | "key", "value" | ``[pages + 1, page_size, kv_heads, dim]`` |
    | attention, `order` "page_token_flat" | "key", "value" | ``[pages + 1, page_size, kv_heads * dim]`` |
    | `Latent` | "latent", "rope"; with `index_dim` "index", of the layers `indexed` | ``[pages + 1, page_size, dim]`` |
    | `Recurrent` | those of `states` | ``[slots + 1, *state.shape]`` |

    All are contiguous. The page ids of a group run from 1 to `pages`, the slots of a recurrent one from 1 to `slots`.
    Page 0 and slot 0 take the writes of padded rows and are not counted.

    `order` names the axes of keys and values. A platform's own order is any other name, and defines its shapes. All
    backends of one server must use the same order. It says nothing about `Latent` and `Recurrent`, which have no heads.
    `dtype` is the name of a torch dtype ("bfloat16"); states have dtypes of their own, and `page_size` does not concern
    them. With "int8", a vector (the key of one token and KV head, for example) is stored as integers and one float32
    scale, 1/127 of its largest magnitude. The scales are in the same tensors, whose shapes are then the platform's own
    in every order; plain tensors have no such place. "float8_e4m3fn" and "float8_e5m2" hold keys and values divided by
    `scales`, those of each layer (empty: 1), rounded to nearest; magnitudes are limited to the largest, NaN stays NaN.
    """

    group: CacheSpec
    page_size: int
    dtype: str
    order: str = "page_token_head"
    scales: tuple[KVScales, ...] = ()

    def names(self) -> tuple[str, ...]:
        """The names of the tensors of one layer."""
        match self.group:
            case FullAttention() | SlidingWindow():
                return "key", "value"
            case Latent():
                return ("latent", "rope", "index") if self.group.index_dim else ("latent", "rope")
            case Recurrent(states=states):
                return tuple(state.name for state in states)
            case _ as never:
                assert_never(never)

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers of the model that have a tensor of this name, in the order of the tensors."""
        return self.group.indexed if isinstance(self.group, Latent) and name == "index" else self.group.layers

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
                sizes = dict(zip(self.names(), (group.latent_dim, group.rope_dim, group.index_dim), strict=False))
                return {name: TensorShape((*axes, size), self.dtype) for name, size in sizes.items()}
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

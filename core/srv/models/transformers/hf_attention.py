"""The attention interface of transformers, implemented with our paged attention.

Owns the function that is registered with transformers, and the calls that it supports. Each forward pass has one
`HFForwardPass`, which transformers passes on as a keyword argument, so the only global state is the registration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface

from srv.errors import ModelError
from srv.models.base import ForwardContext
from srv.specs import AttentionLayer

IMPLEMENTATION = "srv_paged"
STEP = "srv_step"
SINKS = "s_aux"  # what transformers calls the scores of attention sinks
# Keyword arguments of attention that do not change its result, or that are read below.
KNOWN_OPTIONS = {
    STEP,
    SINKS,
    "scaling",
    "sliding_window",
    "softcap",
    "dropout",
    "is_causal",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "attention_type",
    "layer_type",
}


class PoolHeads(NamedTuple):
    """What the KV pool has room for in one layer."""

    kv_heads: int
    head_dim: int


class TrialPass(NamedTuple):
    """What a trial pass knows by layer: the heads of its pool, and the window of a class that has it in its mask."""

    pool: Mapping[int, PoolHeads]
    windows: Mapping[int, int]


class FittedLayer(NamedTuple):
    """An attention layer with the heads of the KV pool, whose keys and values may be fewer and smaller in the class.

    Each KV head of the class is stored `copies` times. Heads are filled up with zeros, which change neither scores nor
    the first `value_dim` elements of a result.
    """

    layer: AttentionLayer
    copies: int
    value_dim: int


class Passes:
    """The forward pass that a model computes at present: for classes that do not hand on keyword arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.current: HFForwardPass | None = None
        self.asked = False  # by the attention of a module
        for module in model.modules():
            module.srv_passes = self  # type: ignore[assignment]


class AttendsAgain(ModelError):
    """A module of a class attends more than once in a pass, so that it needs as many caches."""


class FoundLayers:
    """The attention layers of a model by their numbers, filled in trial passes.

    `by_call`: a module attends more than once in a pass, so that layers are numbered by calls. A class of transformers
    makes these in an order of its own, which is that of its cache slots.

    `sources`: for each layer without a cache, the lower one with whose keys and values it attends, and whose cache it
    reads.
    """

    def __init__(self, by_call: bool = False) -> None:
        self.by_call = by_call
        self.fitted: dict[int, FittedLayer] = {}
        self.sources: dict[int, int] = {}
        self._numbers: dict[nn.Module, int] = {}

    def number(self, module: nn.Module, call: int) -> int:
        """`layer_idx` of a module, else its place in the order of the first pass. `call`: how many came before."""
        if self.by_call:
            return call
        index = getattr(module, "layer_idx", None)
        return index if isinstance(index, int) else self._numbers.setdefault(module, len(self._numbers))


class HFForwardPass:
    """One forward pass: looks up the layer of a module and passes it to `context.attend`.

    `found` is filled in trial passes, and only read afterwards.
    """

    def __init__(self, what: str, context: ForwardContext, found: FoundLayers, trial: TrialPass | None = None) -> None:
        self.what, self.context, self.found, self.trial = what, context, found, trial
        self._attended: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer, in trial passes
        self._calls = 0

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D of values]."""
        index = self.found.number(module, self._calls)
        self._calls += 1
        if self.trial is not None:
            self._learn(self.trial, index, module, query, key, value, options)
        layer, copies, value_dim = self.found.fitted[index]
        q, k, v = (_filled(part[0].transpose(0, 1), layer.head_dim) for part in (query, key, value))
        if copies > 1:
            k, v = (part.repeat_interleave(copies, dim=1) for part in (k, v))
        result = self.context.attend(layer, q.contiguous(), k.contiguous(), v.contiguous())
        return result[..., :value_dim].contiguous().unsqueeze(0)

    def _learn(
        self,
        trial: TrialPass,
        index: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: Mapping[str, Any],
    ) -> None:
        """Record the attention layer of a module, and refuse options that a paged backend cannot implement."""
        foreign = sorted(name for name, given in options.items() if name not in KNOWN_OPTIONS and given is not None)
        if foreign:
            raise unsupported(self.what, f"its attention takes {', '.join(foreign)}, which attention backends do not")
        if index in self._attended:
            again = unsupported(self.what, f"its layer {index} attends more than once, which shows only with weights")
            raise AttendsAgain(again.code, again.what, again.reason, again.remedy)
        source = self._source(trial, index, key, value)
        self._attended[index] = key, value
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise unsupported(self.what, "its attention is not causal")
        if query.shape[-1] != key.shape[-1]:
            raise unsupported(self.what, "its queries and keys have heads of different sizes")
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[-1]
        room = trial.pool.get(source, PoolHeads(kv_heads, dim))
        copies = room.kv_heads // kv_heads if room.kv_heads % kv_heads == 0 and heads % room.kv_heads == 0 else 1
        scale = options.get("scaling")
        layer = AttentionLayer(
            index=index,
            heads=heads,
            kv_heads=kv_heads * copies,
            head_dim=max(dim, value.shape[-1], room.head_dim),
            scale=dim**-0.5 if scale is None else float(scale),
            window=options.get("sliding_window", trial.windows.get(index)),
            soft_cap=options.get("softcap"),
            sinks=options.get(SINKS) is not None,
            sink_scores=self._sink_scores(module, heads, options.get(SINKS)),
        )
        fitted = FittedLayer(layer, copies, value.shape[-1])
        if source != index:
            if fitted != _numbered(self.found.fitted[source], index):
                reason = f"its layer {index} attends to the keys of layer {source}, but not in the same way"
                raise unsupported(self.what, reason)
            self.found.sources[index] = source
        self.found.fitted[index] = fitted

    def _source(self, trial: TrialPass, index: int, key: Tensor, value: Tensor) -> int:
        """The layer whose cache a layer reads: its own, unless it has none and attends to what a lower one computed."""
        others = (at for at, (k, v) in self._attended.items() if k is key and v is value)
        return index if index in trial.pool else next(others, index)

    def _sink_scores(self, module: nn.Module, heads: int, sinks: Tensor | None) -> tuple[float, ...] | None:
        """The scores of attention sinks; None without them, and before weights are loaded."""
        if sinks is None:
            return None
        if all(sinks is not each for each in module.parameters()) or sinks.shape != (heads,):
            raise unsupported(self.what, f"its attention takes {SINKS}, which is not a parameter per head")
        return None if sinks.is_meta else tuple(sinks.float().tolist())


def _numbered(fitted: FittedLayer, index: int) -> FittedLayer:
    return fitted._replace(layer=replace(fitted.layer, index=index))


def _filled(part: Tensor, size: int) -> Tensor:
    """[T, heads, D] -> [T, heads, size], with zeros at the end."""
    return part if part.shape[-1] == size else nn.functional.pad(part, (0, size - part.shape[-1]))


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer. No mask is used: backends mask causally and by window."""
    step = options.get(STEP)
    if step is None and isinstance(passes := getattr(module, "srv_passes", None), Passes):
        step, passes.asked = passes.current, True
    name = type(module).__name__
    if not isinstance(step, HFForwardPass):
        raise unsupported(name, "it does not pass keyword arguments on to its attention")
    if attention_mask is not None:
        raise unsupported(step.what, f"{name} builds its own attention mask")
    return step(module, query, key, value, options), None


def register() -> None:
    """Register the implementation with transformers. It may be registered more than once."""
    AttentionInterface.register(IMPLEMENTATION, attention)


def unsupported(what: str, reason: str) -> ModelError:
    """The error for a model that runs in transformers, but not with paged attention."""
    remedy = "Serve another model: this one does not fit transformers' attention interface as srv uses it"
    return ModelError("unsupported_architecture", what, reason, remedy)


def build_error(what: str, why: str, reason: str) -> ModelError:
    """The error if transformers cannot build the model from this configuration and these weights. `why`: native layers
    do not, the beginning of the text.
    """
    remedy = "Compare config.json with the original: a field of it, or a weight, is not what transformers expects"
    return ModelError("unsupported_config", what, f"{why}transformers cannot build it: {reason}", remedy)

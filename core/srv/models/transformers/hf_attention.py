"""The attention interface of transformers, implemented with our paged attention.

Owns the function that is registered with transformers, and the calls that it supports. Each forward pass has one
`HFForwardPass`, which transformers passes on as a keyword argument, so the only global state is the registration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from srv.errors import ModelError
from srv.models.base import ForwardContext
from srv.specs import AttentionLayer

IMPLEMENTATION = "srv_paged"
STEP = "srv_step"
# Keyword arguments of attention that do not change its result, or that are read below.
KNOWN_OPTIONS = {
    STEP,
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


class HFForwardPass:
    """One forward pass: looks up the layer of a module and passes it to `context.attend`.

    `layers` is filled in trial passes (`learn`), and only read afterwards.
    """

    def __init__(
        self, what: str, context: ForwardContext, layers: dict[int, AttentionLayer], learn: bool = False
    ) -> None:
        self.what, self.context, self.layers, self.learn = what, context, layers, learn

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """query [1, heads, T, D], key and value [1, kv_heads, T, D] -> [1, T, heads, D]."""
        index = getattr(module, "layer_idx", None)
        if self.learn:
            self._learn(index, module, query, key, value, options)
        layer = self.layers[int(str(index))]
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        return self.context.attend(layer, q, k, v).unsqueeze(0)

    def _learn(
        self, index: object, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> None:
        """Record the attention layer of a module, and refuse options that a paged backend cannot implement."""
        foreign = sorted(name for name, given in options.items() if name not in KNOWN_OPTIONS and given is not None)
        if foreign:
            raise unsupported(self.what, f"its attention takes {', '.join(foreign)}, which attention backends do not")
        if not isinstance(index, int):
            raise unsupported(self.what, f"{type(module).__name__} has no layer_idx")
        causal = options.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise unsupported(self.what, "its attention is not causal")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise unsupported(self.what, "its queries, keys and values have heads of different sizes")
        scale, dim = options.get("scaling"), query.shape[-1]
        self.layers[index] = AttentionLayer(
            index=index,
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=dim,
            scale=dim**-0.5 if scale is None else float(scale),
            window=options.get("sliding_window"),
            soft_cap=options.get("softcap"),
        )


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer. No mask is used: backends mask causally and by window."""
    step = options.get(STEP)
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


def build_error(what: str, reason: str) -> ModelError:
    """The error if transformers cannot build the model from this configuration and these weights."""
    remedy = "Compare config.json with the original: a field of it, or a weight, is not what transformers expects"
    return ModelError("unsupported_config", what, f"transformers cannot build it: {reason}", remedy)

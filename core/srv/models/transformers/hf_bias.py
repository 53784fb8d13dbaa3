"""Classes that add a bias of each key to its scores: the bias becomes one more element of the key.

    scale * (q, 1) . (k, bias / scale) = scale * q . k + bias

Which classes these are, and the room for the element in the KV pool, say `srv.models.config.layer_fields.KEY_BIASES`.
Must not know caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def keep_biases(model: nn.Module) -> None:
    """Let the layers of Doge hand the biases of keys to attention, where there is no mask to add them to.

    The class would repeat them for every query, and choose among the keys of a whole batch.
    """
    for module in model.modules():
        prepare = getattr(module, "prepare_dynamic_mask", None)
        if prepare is not None:
            module.prepare_dynamic_mask = partial(_biases, prepare)  # type: ignore[assignment]
            module.srv_key_biases = True  # type: ignore[assignment]


def has_biases(module: nn.Module) -> bool:
    """Whether what a module hands to attention as its mask are the biases of keys."""
    return getattr(module, "srv_key_biases", False) is True


def _biases(
    prepare: Callable[..., Tensor], *, dt_states: Tensor, attention_mask: Tensor | None, **options: Any
) -> Tensor:
    """dt_states [1, kv_heads, T] -> [1, kv_heads, 1, T]; with a mask, what the class makes of both."""
    if attention_mask is not None:
        return prepare(dt_states=dt_states, attention_mask=attention_mask, **options)
    return dt_states.unsqueeze(2)


def with_biases(query: Tensor, key: Tensor, biases: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """query [1, heads, T, D], key [1, kv_heads, T, D], biases [1, heads, 1, T] -> both with D + 1 elements per head."""
    of_keys = biases[:, :: query.shape[1] // key.shape[1]].transpose(2, 3)
    ones = torch.ones_like(query[..., :1])
    return torch.cat((query, ones), -1), torch.cat((key, (of_keys / scale).to(key.dtype)), -1)

"""Which attention layers of a model a backend cannot compute, and why, as clauses for an operator. Torch-free.

`srv plan` and a launch ask with the traits of a backend's spec, a worker with the backend's `supports`. Must not know
how a model's layers are found, nor what is done about the answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from srv.specs import AttentionLayer, ModelFacts, Recurrent


def unsupported_layers(
    layers: Sequence[AttentionLayer], model: ModelFacts, why: Callable[[AttentionLayer], str | None]
) -> tuple[str, ...]:
    """The layers that a backend cannot compute, a clause per reason: "it cannot compute layers 0-4: it has no ...".

    layers: all attention layers of the model, in its order. `why(layer)` returns None or the reason. A window or chunk
    that is not shorter than the context hides nothing, so that such a layer is one with full attention here.
    """
    reasons: dict[str, list[int]] = {}
    for asked, numbers in _distinct_layers(tuple(layers), _numbers(len(layers), model), model.context_length):
        if (reason := why(asked)) is not None:
            reasons.setdefault(reason, []).extend(numbers)
    return tuple(f"it cannot compute {layer_names(sorted(numbers))}: {reason}" for reason, numbers in reasons.items())


def _numbers(count: int, model: ModelFacts) -> tuple[int, ...]:
    """The numbers of the attention layers: others may be between them. In an encoder, no cache group has layers."""
    paged = (group for group in model.cache_groups if not isinstance(group, Recurrent))
    cached = sorted(number for group in paged for number in group.layers)
    return tuple(cached) if len(cached) == count else tuple(range(count))


@functools.lru_cache(maxsize=64)  # every backend is asked about the same layers
def _distinct_layers(
    layers: tuple[AttentionLayer, ...], numbers: tuple[int, ...], context_length: int
) -> tuple[tuple[AttentionLayer, tuple[int, ...]], ...]:
    """The layers that a backend may treat differently, each with the numbers of its equals: most differ only in index.

    A window or chunk that is not shorter than the context is left out.
    """
    found: dict[AttentionLayer, list[int]] = {}
    for number, layer in zip(numbers, layers, strict=True):
        window = layer.window if layer.window is not None and layer.window < context_length else None
        chunk = layer.chunk if layer.chunk is not None and layer.chunk < context_length else None
        found.setdefault(dataclasses.replace(layer, index=0, window=window, chunk=chunk), []).append(number)
    return tuple((layer, tuple(numbers)) for layer, numbers in found.items())


def missing_traits(traits: Collection[str], layer: AttentionLayer) -> str | None:
    """Why a backend whose spec has these traits cannot compute a layer; None if it can."""
    missing = [phrase for trait, phrase in layer.traits().items() if trait not in traits]
    return f"it does not support {' and '.join(missing)}" if missing else None


def layer_names(numbers: Sequence[int]) -> str:
    """Ascending numbers of layers, as "layer 3" or "layers 0-4, 6-10, 12"."""
    ends = [index for index, (low, high) in enumerate(pairwise(numbers), 1) if high != low + 1]
    runs = [numbers[start:end] for start, end in pairwise([0, *ends, len(numbers)])]
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(numbers) > 1 else ''} {shown}"

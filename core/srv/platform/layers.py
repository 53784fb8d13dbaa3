"""Which attention layers of a model a backend cannot compute, and why, as clauses for an operator. Torch-free.

`srv plan` and a launch ask with the traits of a backend's spec, a worker with the backend's `supports`. Must not know
how a model's layers are found, nor what is done about the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from srv.specs import AttentionLayer, ModelFacts, Recurrent


class LayerKind(NamedTuple):
    """Layers that a backend cannot treat differently: a layer with all that they have in common, and their numbers."""

    layer: AttentionLayer
    numbers: tuple[int, ...]


def layer_kinds(layers: Sequence[AttentionLayer], model: ModelFacts) -> tuple[LayerKind, ...]:
    """The kinds of a model's attention layers, which are given in its order.

    A window or chunk that is not shorter than the context hides nothing: such a layer is one with full attention here.
    So is one whose temperature begins behind the context.
    """
    numbers_by_kind: dict[AttentionLayer, list[int]] = {}
    for number, layer in zip(_numbers(len(layers), model), layers, strict=True):
        window = layer.window if layer.window is not None and layer.window < model.context_length else None
        chunk = layer.chunk if layer.chunk is not None and layer.chunk < model.context_length else None
        first = layer.temperature_from
        first = first if first is not None and first < model.context_length - 1 else None
        kind = dataclasses.replace(layer, index=0, window=window, chunk=chunk, temperature_from=first)
        numbers_by_kind.setdefault(kind, []).append(number)
    return tuple(LayerKind(layer, tuple(numbers)) for layer, numbers in numbers_by_kind.items())


def unsupported_layers(kinds: Iterable[LayerKind], why: Callable[[AttentionLayer], str | None]) -> tuple[str, ...]:
    """The layers that a backend cannot compute, a clause per reason: "it cannot compute layers 0-4: it has no ...".

    why(layer): None or the reason.
    """
    reasons: dict[str, list[int]] = {}
    for layer, numbers in kinds:
        if (reason := why(layer)) is not None:
            reasons.setdefault(reason, []).extend(numbers)
    return tuple(f"it cannot compute {layer_names(sorted(numbers))}: {reason}" for reason, numbers in reasons.items())


def _numbers(count: int, model: ModelFacts) -> tuple[int, ...]:
    """The numbers of the attention layers: others may be between them. In an encoder, no cache group has layers."""
    paged = (group for group in model.cache_groups if not isinstance(group, Recurrent))
    cached = sorted(number for group in paged for number in group.layers)
    return tuple(cached) if len(cached) == count else tuple(range(count))


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

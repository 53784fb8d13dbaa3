"""Which attention layers of a model a backend cannot compute, and why, as clauses for an operator. Torch-free.

`srv plan` and a launch ask with the traits of a backend's spec, a worker with the backend's `supports`. Must not know
how a model's layers are found, nor what is done about the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from srv.specs import AttentionLayer


def unsupported_layers(
    layers: Sequence[AttentionLayer], context_length: int, why: Callable[[AttentionLayer], str | None]
) -> tuple[str, ...]:
    """The layers that a backend cannot compute, a clause per reason: "it cannot compute layers 0-4: it has no ...".

    layers: all of a model, in its order, which gives their numbers. `why(layer)` returns None or the reason. A window
    that is not shorter than the context hides nothing, so that such a layer is one with full attention here.
    """
    reasons: dict[str, list[int]] = {}
    known: dict[AttentionLayer, str | None] = {}  # most layers differ in nothing but their index
    for number, layer in enumerate(layers):
        window = layer.window if layer.window is not None and layer.window < context_length else None
        asked = dataclasses.replace(layer, index=0, window=window)
        if asked not in known:
            known[asked] = why(asked)
        reason = known[asked]
        if reason is not None:
            reasons.setdefault(reason, []).append(number)
    return tuple(f"it cannot compute {_named(numbers)}: {reason}" for reason, numbers in reasons.items())


def missing_traits(traits: Collection[str], layer: AttentionLayer) -> str | None:
    """Why a backend whose spec has these traits cannot compute a layer; None if it can."""
    missing = [phrase for trait, phrase in layer.traits().items() if trait not in traits]
    return f"it does not support {' and '.join(missing)}" if missing else None


def _named(numbers: Sequence[int]) -> str:
    """Ascending numbers of layers, as "layer 3" or "layers 0-4, 6-10, 12"."""
    ends = [index for index, (low, high) in enumerate(pairwise(numbers), 1) if high != low + 1]
    runs = [numbers[start:end] for start, end in pairwise([0, *ends, len(numbers)])]
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' if len(numbers) > 1 else ''} {shown}"

"""Recurrent states for tests of layers: a slot per sequence, in place of the worker's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.layers.states import LayerStates
from srv.models.transformers.hf_check import DenseCache
from srv.specs import ModelFacts, Recurrent


class RowStates:
    """The states of `slots` sequences; `rows` are (slot, tokens) of the next pass."""

    def __init__(self, facts: ModelFacts, slots: int = 4) -> None:
        groups = [group for group in facts.cache_groups if isinstance(group, Recurrent)]
        self.tensors = {
            layer: {state.name: torch.zeros(slots + 1, *state.shape) for state in group.states}
            for group in groups
            for layer in group.layers
        }
        self.rows: Sequence[tuple[int, int]] = ()

    def __call__(self, group: int, index: int) -> LayerStates:
        slots, lens = zip(*self.rows, strict=True)
        return LayerStates(self.tensors[index], torch.tensor(slots), lens)


def recurrent_logits(model: CausalLM, facts: ModelFacts, tokens: Tensor, first: int = 7) -> Tensor:
    """Logits of the sequence in two chunks and a last token alone, batched with a copy of the sequence; all must agree.

    The copy is in one chunk, except for its own last token.
    """
    cache, states, count = DenseCache(), RowStates(facts), len(tokens)
    positions, parts = torch.arange(count), []
    passes = (
        (("a", 2, 0, first),),
        (("b", 4, 0, count - 1), ("a", 2, first, count - 1)),
        (("b", 4, count - 1, count), ("a", 2, count - 1, count)),
    )
    with torch.inference_mode():
        for rows in passes:
            cache.rows = tuple((name, begin, end - begin) for name, _, begin, end in rows)
            states.rows = tuple((slot, end - begin) for _, slot, begin, end in rows)
            ids, places = (
                torch.cat([tensor[begin:end] for _, _, begin, end in rows]) for tensor in (tokens, positions)
            )
            hidden = model(ModelInputs(ids, places), ForwardContext(cache.attend, states))
            parts.append(model.logits(hidden))
    copy = torch.cat((parts[1][: count - 1], parts[2][:1]))
    chunked = torch.cat((parts[0], parts[1][count - 1 :], parts[2][1:]))
    assert float((chunked - copy).norm() / copy.norm()) < 1e-4
    return copy

"""Calculates the scales of a KV pool of 8-bit floats, from the keys and values of a fixed sequence of tokens.

Owns the tokens and the measurement. The model computes them before the pool is allocated, with pages of their own in
the dtype of the activations, which no scale affects. The scales are fixed before a page of the pool is written. It must
not know what scales follow from magnitudes (`srv.planning.kv_scales`), nor requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from srv.args.config import Config
from srv.models.base import Attend, CausalLM, ForwardContext, ModelInputs
from srv.planning.kernel import ATTENTION_SLOTS
from srv.planning.kv_scales import ScaleSource, calculated_scales
from srv.platform.interface import AttentionBackend, BackendContext, Communicator
from srv.platform.pools import allocate_pool
from srv.specs import AttentionLayer, KVLayout, ModelFacts
from srv.worker.attention import StepAttention
from srv.worker.chosen_backends import ChosenBackends

MOST_TOKENS = 512
_GOLDEN = 0.6180339887  # multiples of it, modulo 1, are spread evenly over the interval from 0 to 1
logger = logging.getLogger(__name__)


def scale_tokens(model: ModelFacts, count: int) -> list[int]:
    """The token that begins texts, if the model has one, and then tokens from all over the vocabulary.

    Keys of the first token are often the largest: queries that look for nothing attend to it.
    """
    begin = model.config.get("bos_token_id")
    first = begin if isinstance(begin, int) and 0 <= begin < model.vocab_size else 0
    return [first, *(int(index * _GOLDEN % 1 * model.vocab_size) for index in range(1, count))]


class _Measuring:
    """`attend` of steps, with the largest magnitudes of keys and values, float32 [2], by cache group and index."""

    def __init__(self) -> None:
        self.attend: Attend | None = None  # of the step that runs
        self.largest: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place, found = (layer.group, layer.index), torch.stack((k.abs().amax(), v.abs().amax())).float()
        self.largest[place] = torch.maximum(found, self.largest.get(place, found))  # NaN stays NaN
        assert self.attend is not None
        return self.attend(layer, q, k, v)


class ScaleSteps(NamedTuple):
    """The steps of one rank. `layouts`: of each cache group of the pool. `communicator`: None for one rank."""

    config: Config
    facts: ModelFacts
    model: CausalLM
    layouts: Sequence[KVLayout]
    communicator: Communicator | None

    def scales(self, context: BackendContext, backends: ChosenBackends, most_tokens: int) -> ScaleSource:
        """The scales of all layers, the same on every rank. `most_tokens`: of a request.

        `context`: of backends, without a pool. Raises ModelError (kv_scales) for keys or values that are not finite.
        """
        count = min(MOST_TOKENS, most_tokens)
        if self.communicator is not None:
            self.communicator.barrier()  # the steps of all ranks have to begin together
        with context.transfers.streams.compute.use(), torch.inference_mode():
            largest = self._measured(context, backends, count)
        scales = calculated_scales(self.config, self.facts, largest)
        logger.info("scales of keys and values are calculated from %d tokens: %s", count, _range(scales))
        return scales

    def _measured(
        self, context: BackendContext, backends: ChosenBackends, count: int
    ) -> dict[int, tuple[float, float]]:
        """The largest magnitudes of the keys and values of each layer, on any rank."""
        tokens = torch.tensor(scale_tokens(self.facts, count), device=context.device)
        attention: list[AttentionBackend] = []
        tables: list[Tensor] = []
        for layout in self.layouts:
            pages = -(-count // layout.page_size)
            unscaled = replace(layout, dtype=self.config.model.dtype, scales=())
            pool = allocate_pool(context.platform, unscaled, pages)
            attention.append(backends.attention_of(ATTENTION_SLOTS[0], replace(context, kv=pool)))
            tables.append(torch.arange(1, pages + 1, dtype=torch.int32, device=context.device).view(1, -1))
        measuring, positions, chunk = _Measuring(), torch.arange(count, device=context.device), self._most_per_step()
        for begin in range(0, count, chunk):
            end = min(begin + chunk, count)
            measuring.attend = StepAttention(attention, [end - begin], [end], tables)
            self.model(ModelInputs(tokens[begin:end], positions[begin:end]), ForwardContext(measuring))
        found = torch.stack(list(measuring.largest.values()))
        if self.communicator is not None:
            found = self.communicator.all_gather(found).amax(0)
        layers = [self.layouts[group].group.layers[index] for group, index in measuring.largest]
        return {layer: (keys, values) for layer, (keys, values) in zip(layers, found.tolist(), strict=True)}

    def _most_per_step(self) -> int:
        """For how many tokens of a prompt the memory budget has activations."""
        schedule = self.config.schedule
        return schedule.chunked_prefill_size if schedule.chunked_prefill_size > 0 else schedule.max_prefill_tokens


def _range(scales: ScaleSource) -> str:
    keys, values = zip(*scales.by_layer.values(), strict=True)
    return f"{min(keys):.3g} to {max(keys):.3g} for keys, {min(values):.3g} to {max(values):.3g} for values"

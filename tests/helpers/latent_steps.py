"""Steps of a model with latent attention, through the CPU's attention."""

from __future__ import annotations

import torch
from models_small import HOST
from torch import Tensor

from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.platform.interface import BackendContext
from srv.platform.pools import plain_pool
from srv.specs import KVLayout, Latent
from srv.worker.attention import StepAttention
from srv_cpu.latent_attention import TorchLatentAttention


class Steps:
    """The model's steps over a pool that contains NaN wherever nothing was written."""

    def __init__(self, model: CausalLM, group: Latent, **arguments: bool) -> None:
        pool = plain_pool(KVLayout(group, 4, "float32"), 40, HOST)
        for tensor in pool.all():
            tensor.fill_(float("nan"))
        self._model = model
        self.backend = TorchLatentAttention(BackendContext(None, HOST, pool, 8, None, arguments))  # type: ignore[arg-type]
        for layer, up in model.up_projections():
            self.backend.prepare(layer, up)

    def run(self, rows: list[tuple[list[int], Tensor, int]]) -> Tensor:
        """The logits of a step; each row has its pages, its new tokens, and how many come before these."""
        lens, ends = [len(tokens) for _, tokens, _ in rows], [computed + len(tokens) for _, tokens, computed in rows]
        width = max(len(pages) for pages, _, _ in rows)
        table = torch.tensor([pages + [0] * (width - len(pages)) for pages, _, _ in rows], dtype=torch.int32)
        tokens = torch.cat([tokens for _, tokens, _ in rows])
        positions = torch.cat([torch.arange(computed, computed + len(tokens)) for _, tokens, computed in rows])
        with torch.inference_mode():
            attend = StepAttention([self.backend], lens, ends, [table])
            return self._model.logits(self._model(ModelInputs(tokens, positions), ForwardContext(attend)))

"""The modules of Gemma 3n and Gemma 4 beside attention and MLP: residual streams, and inputs of single layers.

    streams [T, S, H] ─ predict ─┬─ active ─ norm ─┬─ attention ─ norm ─(+ active)─(+ laurel)/√2 ─┬─ MLP ─ norm ─(+)─┐
                                 │                 └─ laurel ──────────────────────────┘          └──────────────────┤
                                 └────────────────────────────────────────────────────────────────────────── correct ┤
    streams ─(+ all but the first: layer's input ─ norm)──────────────────────────────────────────────────────────────┘

This is a layer of Gemma 3n. Every rank computes all but attention, MLP and experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from srv.models import blueprint
from srv.models.base import ModelInputs
from srv.models.blueprint import gemma as gemma_parts
from srv.models.layers.embedding import VocabularyParallelLookup
from srv.models.layers.weight_module import WeightModule
from srv.models.modules.feed_forward import MoE
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place

_LEAST_SQUARE = 1e-5  # of the mean square of a projection, by whose root it is divided


class LayerInputs(nn.Module):
    """Tokens and their embeddings to what layers add of their own, [T, layers, size]. Tokens that the table does not
    have, those of images and audio, count as token 0.
    """

    def __init__(self, part: gemma_parts.LayerInputs, place: Place) -> None:
        super().__init__()
        rows, table = place.over("embedding"), part.table
        context = rows.context
        self.rows, self.size, self.factor = table.rows, part.size, table_factor(part.size, context.dtype)
        embedding = rows.factory.embedding(place.within(table).prefix, table.rows, table.size)
        self.lookup: nn.Module = embedding
        if context.communicator is not None:
            self.lookup = VocabularyParallelLookup(embedding, context.communicator)
        self.projection, self.norm = place.linear(part.projection), make_norm(part.norm, place)
        self.projected_factor = part.projection.inputs**-0.5

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        own: Tensor = self.lookup(tokens.masked_fill(tokens >= self.rows, 0)) * self.factor
        projected = (self.projection.kernel(x) * self.projected_factor).view(-1, self.size)
        return (self.norm.forward(projected).view(own.shape) + own).mul(0.5**0.5).view(len(x), -1, self.size)


class LayerInput(nn.Module):
    def __init__(self, part: gemma_parts.LayerInput, place: Place) -> None:
        super().__init__()
        self.gate, self.projection = place.linear(part.gate), place.linear(part.projection)
        self.norm = make_norm(part.norm, place)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """x [T, hidden], own [T, size] -> [T, hidden]."""
        gated = F.gelu(self.gate.kernel(x), approximate="tanh") * own
        return self.norm.forward(self.projection.kernel(gated))


class StreamProjections(nn.Module):
    """[T, hidden] -> [T, streams, hidden]."""

    def __init__(self, part: gemma_parts.StreamProjections, place: Place) -> None:
        super().__init__()
        self.projections = place.linear(part.projections)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        others = self.projections.kernel(x).view(len(x), -1, x.shape[-1])
        return torch.cat((x.unsqueeze(1), _of_magnitude(others, x.unsqueeze(1))), 1)


class StreamMean(nn.Module):
    """[T, streams, hidden] -> [T, hidden]."""

    def __init__(self, part: gemma_parts.StreamMean, place: Place) -> None:
        super().__init__()
        self.projections = nn.ModuleList(map(place.linear, part.projections))

    def forward(self, streams: Tensor) -> Tensor:
        first, *others = streams.unbind(1)
        projected = torch.stack([each(x) for each, x in zip(self.projections, others, strict=True)], 1)
        first = first.unsqueeze(1)
        return torch.cat((first, _of_magnitude(projected, first)), 1).mean(1)


class AltUp(WeightModule):
    def __init__(self, part: gemma_parts.AltUp, place: Place) -> None:
        super().__init__()
        at, ((name, shape),) = place.within(part), part.scale.shapes.items()
        self.number, self.active, self.scales = part.number, part.active, part.scales
        self.corrections, self.predictions, self.router = map(
            at.linear, (part.corrections, part.predictions, part.router)
        )
        self.router_norm, self.router_factor = make_norm(part.router_norm, at), 1 / part.router_norm.size
        self.name, self.scale = at.name(name), place.context.empty(*shape)

    def predict(self, streams: Tensor) -> Tensor:
        mixing = self.predictions.kernel(self._routed(streams[:, self.active])).view(-1, self.number, self.number)
        return streams + mixing @ streams

    def correct(self, predicted: Tensor, x: Tensor) -> Tensor:
        """predicted [T, S, H], and what the layer made of the active one, x [T, H] -> [T, S, H]."""
        weights = self.corrections.kernel(self._routed(x)) + 1
        return predicted + weights.unsqueeze(-1) * (x - predicted[:, self.active]).unsqueeze(1)

    def read(self, streams: Tensor) -> Tensor:
        """What the layer's input joins: [T, S, H] -> [T, H]."""
        active = streams[:, self.active]
        return active * self.scale if self.scales else active

    def _routed(self, x: Tensor) -> Tensor:
        routed = self.router.kernel(self.router_norm.forward(x) * self.router_factor)
        return torch.tanh(routed.float()).to(x.dtype)

    def weight_views(self) -> dict[str, Tensor]:
        return {self.name: self.scale}


class Laurel(nn.Module):
    def __init__(self, part: gemma_parts.Laurel, place: Place) -> None:
        super().__init__()
        at = place.within(part)
        self.left, self.right, self.norm = at.linear(part.left), at.linear(part.right), make_norm(part.norm, at)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm.forward(self.right.kernel(self.left.kernel(x)))


class SideExperts(MoE):
    """[T, hidden] -> [T, hidden], from the residual; the sum over all ranks."""

    def __init__(self, part: gemma_parts.SideExperts, place: Place) -> None:
        super().__init__(part, place)
        self.router_norm, self.before, self.after, self.beside = (
            make_norm(each, place) for each in (part.router_norm, part.before, part.after, part.beside)
        )
        self.scales, self.router_factor = LooseTensors(part.scales, place), part.experts.hidden**-0.5
        self.communicator = place.context.communicator

    def forward(self, x: Tensor) -> Tensor:
        of_inputs, of_experts = self.scales.tensors
        read = self.router_norm.forward(x) * of_inputs * self.router_factor
        ids, weights = self._route(self.router.kernel(read).float(), None, *self._routing)
        if self.observe is not None:
            self.observe(ids)
        out = self.experts.kernel(self.before.forward(x), self.of_rank(ids), weights * of_experts[ids].float())
        return self.after.forward(out if self.communicator is None else self.communicator.all_reduce(out))


class LooseTensors(WeightModule):
    """Weights that belong to no layer of a kind of its own, in the order of the part."""

    def __init__(self, part: blueprint.Tensors, place: Place) -> None:
        super().__init__()
        self.names = tuple(place.within(part).name(name) for name in part.shapes)
        self.tensors = nn.ParameterList(place.context.empty(*shape) for shape in part.shapes.values())

    def weight_views(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.tensors, strict=True))


def table_factor(size: int, dtype: torch.dtype) -> float:
    """By which rows of the table are multiplied, rounded as the models were trained."""
    return float(torch.tensor(size**0.5).to(dtype).item())


def _of_magnitude(x: Tensor, target: Tensor) -> Tensor:
    """x with the root mean square of `target`, over the last axis."""
    squares, wanted = (each.float().square().mean(-1, keepdim=True) for each in (x, target))
    return (x * (wanted.sqrt() / squares.clamp_min(_LEAST_SQUARE).sqrt())).to(x.dtype)

"""The layers of decoders, by the order in which the results of their parts are added to the residual.

    sequence          ─┬─ [norm] ─ mixer ─ [norm] ─(+)─┬─ [norm] ─ MLP ─ [norm] ─(+)─ …
                       └─────────── residual ──────────┘└───────── residual ─────┘
    parallel          ─┬─ norm ─┬─ mixer ─(+)─(+)─ …        the MLP may have a norm of its own
                       │        └─ MLP ────┘   │
                       └─────── residual ──────┘
    normed_residual   ─ norm ─┬─ mixer ─(+)─ norm ─┬─ MLP ─(+)─ …
                              └─────────┘          └───────┘
    streams           each part reads a sum of several residual streams, and its result joins each of them
    altup             both parts read one of several residual streams, and the layer corrects the others by their result
    scaled            in sequence, with what the layer adds of its own; a number multiplies the residual after that
    single part       ─┬─ norm ─ mixer or MLP ─(+)─ …
                       └─────── residual ──────┘

A layer receives what is still to be added to the residual, so that the norm which follows can add it in the same op.
Sharded over ranks, results of the two parts are partial sums, which an all-reduce adds up; parallel layers need one,
the others two. Norms and the residual are the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from srv.errors import InternalError
from srv.models import blueprint
from srv.models.base import ForwardContext, ModelInputs
from srv.models.blueprint import gemma as gemma_parts
from srv.models.blueprint import recurrent as recurrent_parts
from srv.models.blueprint.latent import Latent
from srv.models.blueprint.streams import StreamMixing
from srv.models.blueprint.uneven import UnevenAttention as UnevenPart
from srv.models.layers.norm import Norm, joined
from srv.models.modules.attention import Attention
from srv.models.modules.delta import GatedDeltaNet
from srv.models.modules.feed_forward import MLP, MoE, feed_forward
from srv.models.modules.gemma import AltUp, Laurel, LayerInput, LooseTensors, SideExperts
from srv.models.modules.latent_attention import LatentAttention
from srv.models.modules.lightning import LightningAttention
from srv.models.modules.mixer import Mixer
from srv.models.modules.norms import make_norm
from srv.models.modules.place import Place
from srv.models.modules.reading_attention import ReadingAttention
from srv.models.modules.replicas import ReplicaRows
from srv.models.modules.rglru import RecurrentBlock
from srv.models.modules.selective_scan import SelectiveScan
from srv.models.modules.short_conv import ShortConvolution
from srv.models.modules.state_space import StateSpace
from srv.models.modules.streams import StreamMixer
from srv.models.modules.uneven_attention import UnevenAttention


class StackLayer(nn.Module, ABC):
    """What a decoder computes one after the other. `marked`: its parts, by the names of the checkpoint."""

    marked: Mapping[str, nn.Module]

    @abstractmethod
    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        """(what is still to be added to the residual, the residual), each [T, hidden]; None for nothing."""


class DecoderLayer(StackLayer):
    """A layer with two parts. `attention`: what mixes tokens, which may be states in place of attention.

    `attention_norm`, `mlp_norm`: of what the two parts read; `attention_output_norm`, `mlp_output_norm`: of their
    results. Each is None in models without it.
    """

    def __init__(self, part: blueprint.Layer, place: Place) -> None:
        super().__init__()
        made = [_mixer(each, place.within(each)) for each in part.mixers]
        self.attention = made[0] if len(made) == 1 else SideBySide(made, part.scales)
        self.mlp = feed_forward(part.feed_forward, place.within(part.feed_forward))
        named = zip(part.mixers, made, strict=True)
        mixing = {place.within(each).prefix: module for each, module in named}
        self.marked = {**mixing, place.name("mlp"): self.mlp}
        before, between, after = (
            [make_norm(each, place) for each in parts if isinstance(each, blueprint.Norm)]
            for parts in (part.before, part.between, part.after)
        )
        self.attention_output_norm = between.pop(0) if after else None
        self.attention_norm, self.mlp_norm, self.mlp_output_norm = (
            norms[0] if norms else None for norms in (before, between, after)
        )
        self.reduce_mixed, self.reduce_fed = _all_reduce(place.over("heads")), _all_reduce(place)
        self.replica_rows = ReplicaRows.of(place)
        self.mixer_factor, self.mlp_factor = map(unless_one, (part.mixer_factors.added, part.factors.added))
        norms_of_results = (self.attention_output_norm, self.mlp_output_norm)
        steps = (self.reduce_mixed, self.reduce_fed, *norms_of_results, self.mixer_factor, self.mlp_factor)
        self.plain = all(step is None for step in steps)  # results join the residual as they are
        self.kept_by_mixer, self.kept_by_mlp = map(unless_one, (part.mixer_factors.kept, part.factors.kept))

    def mix(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        """What the mixer adds to the residual, from what it reads."""
        out = self.attention.forward(x, inputs, context)
        if self.plain:
            return out
        return _joining(out, self.reduce_mixed, self.attention_output_norm, self.mixer_factor)

    def feed(self, x: Tensor, context: ForwardContext) -> Tensor:
        """What the feed-forward part adds to the residual, from what it reads."""
        if self.plain:
            return self.mlp.forward(x)
        return _joining(self.fed(x, context), None, self.mlp_output_norm, self.mlp_factor)

    def fed(self, x: Tensor, context: ForwardContext) -> Tensor:
        """The result of the feed-forward part, of all ranks that divide it."""
        if self.replica_rows is None:
            return self._summed(x)
        return self.replica_rows.run(self._summed, x, context.tokens)

    def _summed(self, x: Tensor) -> Tensor:
        """The feed-forward part of these rows, added up over all ranks."""
        out = self.mlp.forward(x)
        return out if self.reduce_fed is None else self.reduce_fed(out)


class SequentialLayer(DecoderLayer):
    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        read, residual = joined(self.attention_norm, x, residual)
        if not self.plain:
            read, residual = joined(self.mlp_norm, self.mix(read, inputs, context), residual)
            return self.feed(read, context), residual
        read, residual = joined(self.mlp_norm, self.attention.forward(read, inputs, context), residual)
        return self.mlp.forward(read), residual


class ParallelLayer(DecoderLayer):
    """Without a norm of its own, the MLP reads what the mixer reads."""

    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        read, residual = joined(self.attention_norm, x, residual)
        own = read if self.mlp_norm is None else self.mlp_norm.forward(residual)
        mixed = self.attention.forward(read, inputs, context)
        if self.reduce_mixed == self.reduce_fed:  # the same ranks
            out = mixed + self.mlp.forward(own)
            return out if self.reduce_fed is None else self.reduce_fed(out), residual
        return _joining(mixed, self.reduce_mixed, None, None) + self.fed(own, context), residual


class NormedResidualLayer(DecoderLayer):
    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        read, _ = joined(self.attention_norm, x, residual)
        residual = read if self.kept_by_mixer is None else read * self.kept_by_mixer
        read, _ = joined(self.mlp_norm, self.mix(read, inputs, context), residual)
        return self.feed(read, context), read if self.kept_by_mlp is None else read * self.kept_by_mlp


class StreamedLayer(DecoderLayer):
    """The residual is [T, streams, hidden]."""

    attention_norm: Norm
    mlp_norm: Norm

    def __init__(self, part: blueprint.Layer, place: Place) -> None:
        super().__init__(part, place)
        self.mixer_streams, self.mlp_streams = (
            StreamMixer(each, place) for each in (*part.before, *part.between) if isinstance(each, StreamMixing)
        )

    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        read, weights = self.mixer_streams.read(residual)
        mixed = self.mix(self.attention_norm.forward(read), inputs, context)
        residual = self.mixer_streams.join(residual, mixed, weights)
        read, weights = self.mlp_streams.read(residual)
        return None, self.mlp_streams.join(residual, self.feed(self.mlp_norm.forward(read), context), weights)


class AltUpLayer(DecoderLayer):
    """The residual is [T, streams, hidden], of which attention and MLP read one (Gemma 3n)."""

    attention_norm: Norm
    mlp_norm: Norm

    def __init__(self, part: blueprint.Layer, place: Place) -> None:
        super().__init__(part, place)
        self.number = place.layer
        for each in (*part.before, *part.between, *part.after):
            match each:
                case gemma_parts.AltUp():
                    self.altup = AltUp(each, place)
                case gemma_parts.Laurel():
                    self.laurel = Laurel(each, place)
                case gemma_parts.LayerInput():
                    self.input = LayerInput(each, place)

    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        predicted = self.altup.predict(residual)
        active = predicted[:, self.altup.active]
        read = self.attention_norm.forward(active)
        mixed = (active + self.mix(read, inputs, context) + self.laurel.forward(read)) * 0.5**0.5
        streams = self.altup.correct(predicted, mixed + self.feed(self.mlp_norm.forward(mixed), context))
        own = self.input.forward(self.altup.read(streams), inputs.of_layer(self.number))
        return None, torch.cat((streams[:, :1], streams[:, 1:] + own.unsqueeze(1)), 1)


class ScaledLayer(DecoderLayer):
    """The residual is multiplied by a learned number after the layer (Gemma 4)."""

    def __init__(self, part: blueprint.Layer, place: Place) -> None:
        super().__init__(part, place)
        self.number, self.experts, self.input = place.layer, None, None
        for each in part.after:
            match each:
                case gemma_parts.SideExperts():
                    self.experts = SideExperts(each, place)
                    self.marked = {**self.marked, place.name("experts"): self.experts}
                case gemma_parts.LayerInput():
                    self.input = LayerInput(each, place)
                case gemma_parts.LayerScale():
                    self.scale = LooseTensors(each, place)

    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        read, residual = joined(self.attention_norm, x, residual)
        read, residual = joined(self.mlp_norm, self.mix(read, inputs, context), residual)
        total = residual + (
            self.feed(read, context)
            if self.experts is None
            else self._with_experts(self.experts, read, residual, context)
        )
        if self.input is not None:
            total = total + self.input.forward(total, inputs.of_layer(self.number))
        return None, total * self.scale.tensors[0]

    def _with_experts(self, experts: SideExperts, read: Tensor, residual: Tensor, context: ForwardContext) -> Tensor:
        dense = experts.beside.forward(self.fed(read, context))
        if self.replica_rows is None:
            routed = experts.forward(residual)
        else:
            routed = self.replica_rows.run(experts.forward, residual, context.tokens)
        assert self.mlp_output_norm is not None
        return self.mlp_output_norm.forward(dense + routed)


class SinglePartLayer(StackLayer):
    def __init__(self, part: blueprint.SinglePartLayer, place: Place) -> None:
        super().__init__()
        self.norm = make_norm(part.norm, place)
        inner, within = part.part, place.within(part.part)
        self.part: Mixer | MLP | MoE
        if isinstance(inner, blueprint.Mixer):
            self.part = _mixer(inner, within)
        elif isinstance(inner, blueprint.MLP | blueprint.MoE):
            self.part = feed_forward(inner, within)
        else:
            raise InternalError(f"{type(inner).__name__} has no module")
        self.marked = {within.prefix: self.part}
        is_mixer = isinstance(inner, blueprint.Mixer)
        self.reduce = _all_reduce(place.over("heads") if is_mixer else place)
        self.replica_rows = None if is_mixer else ReplicaRows.of(place)

    def forward(
        self, x: Tensor | None, residual: Tensor, inputs: ModelInputs, context: ForwardContext
    ) -> tuple[Tensor | None, Tensor]:
        read, residual = joined(self.norm, x, residual)
        if isinstance(self.part, Mixer):
            return self._summed(self.part.forward(read, inputs, context)), residual
        if self.replica_rows is None:
            return self._fed(read), residual
        return self.replica_rows.run(self._fed, read, context.tokens), residual

    def _fed(self, x: Tensor) -> Tensor:
        assert not isinstance(self.part, Mixer)
        return self._summed(self.part.forward(x))

    def _summed(self, out: Tensor) -> Tensor:
        return out if self.reduce is None else self.reduce(out)


class SideBySide(Mixer):
    """Several mixers, whose results are added. `scales`: by which inputs and results of each are multiplied."""

    def __init__(self, mixers: Sequence[Mixer], scales: Sequence[tuple[float, float]]) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)
        self.scales = tuple(scales) or ((1.0, 1.0),) * len(mixers)

    def forward(self, x: Tensor, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        results = (
            mixer.forward(x * before, inputs, context) * after
            for mixer, (before, after) in zip(self.mixers, self.scales, strict=True)
        )
        total: Tensor = next(results)
        for result in results:
            total = total + result
        return total


def make_layer(part: blueprint.Layer, place: Place) -> DecoderLayer:
    """Raises InternalError for a part that states what layers of its order do not compute."""
    factors = (part.mixer_factors, part.factors)
    if part.order != "normed_residual" and any(each.kept != 1.0 for each in factors):
        raise InternalError(f"{place.prefix}: a layer in {part.order} order multiplies no residual")
    if part.order == "parallel" and (part.after or any(each.added != 1.0 for each in factors)):
        raise InternalError(f"{place.prefix}: a layer in parallel order has neither factors nor norms of its results")
    match part.order:
        case "sequence":
            return SequentialLayer(part, place)
        case "parallel":
            return ParallelLayer(part, place)
        case "normed_residual":
            return NormedResidualLayer(part, place)
        case "streams":
            return StreamedLayer(part, place)
        case "altup":
            return AltUpLayer(part, place)
        case "scaled":
            return ScaledLayer(part, place)


def _all_reduce(place: Place) -> Callable[[Tensor], Tensor] | None:
    """Adds up the partial sums of several ranks; None on a single one."""
    communicator = place.context.communicator
    return None if communicator is None else communicator.all_reduce


def _joining(out: Tensor, reduce: Callable[[Tensor], Tensor] | None, norm: Norm | None, factor: float | None) -> Tensor:
    """What joins the residual, from the result of a part on this rank."""
    if reduce is not None:
        out = reduce(out)
    if norm is not None:
        out = norm.forward(out)
    return out if factor is None else out * factor


def unless_one(factor: float) -> float | None:
    return None if factor == 1.0 else factor


def _mixer(part: blueprint.Mixer, place: Place) -> Mixer:
    place = place.over("heads")
    match part:
        case UnevenPart():
            return UnevenAttention(part, place)
        case gemma_parts.ReadingAttention():
            return ReadingAttention(part, place)
        case blueprint.Attention():
            return Attention(part, place)
        case Latent():
            return LatentAttention(part, place)
        case recurrent_parts.DeltaNet():
            return GatedDeltaNet(part, place)
        case recurrent_parts.ShortConvolution():
            return ShortConvolution(part, place)
        case recurrent_parts.StateSpace():
            return StateSpace(part, place)
        case recurrent_parts.Lightning():
            return LightningAttention(part, place)
        case recurrent_parts.LinearRecurrence():
            return RecurrentBlock(part, place)
        case recurrent_parts.SelectiveScan():
            return SelectiveScan(part, place)
    raise InternalError(f"{type(part).__name__} has no module")

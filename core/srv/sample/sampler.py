"""From logits to tokens: processors, then the sampling backend, then log-probabilities.

Owns their order and the result of each row. The backend samples the tokens. Must not know any device, and never
synchronizes with it: copies of results to the host are requested here and read later.

    logits ──► processors ──► backend.sample ──► tokens ──► processors observe them
       └────────────── log-probabilities of those tokens, before processors ──► host

A step with drafts has several positions per row: each is sampled like a row of its own, and `DraftShape` says which
of the tokens count.

If no processor is active and every row is greedy, a backend with `GreedySampling` gets the unmodified logits of the
model, and reports which rows are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from srv.errors import InternalError
from srv.platform.interface import GreedySampling, SamplingBackend, SamplingBatch
from srv.sample.logprobs import ListedTokens, Scores, listed_tokens, score
from srv.sample.noise import DeviceNoise, SlotNoise
from srv.sample.processors import LogitsProcessor, SampleRow
from srv.sample.state import SamplerState
from srv.sample.verify import DraftRows
from srv.sched.plan import NON_FINITE_LOGITS
from srv.types import SamplingParams, TokenLogprob

__all__ = ["SampleRow", "SampledBatch", "SampledToken", "Sampler", "SamplerState"]

NON_FINITE = (
    NON_FINITE_LOGITS,
    "The model gave no finite logits for this request, or its parameters exclude every token, so none can be drawn. "
    "Other requests are unharmed; try a wider dtype if it happens again.",
)


class SampledToken(NamedTuple):
    """One row's result on the host. If there is an `error` (code, message), `token` is meaningless."""

    token: int
    logprob: TokenLogprob | None = None
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The result of `Sampler.sample` or `Sampler.sample_drafts`.

    `tokens`: int64 [rows, or positions] on the device, for the next step; 0 for a row with an error. `accepted`: int64
    [rows] on the device, how many of each row's tokens count; None without drafts. The other tensors are
    copied to the host: call `to_host` when the copies of the step are done (`StepCopies.wait`).
    """

    tokens: torch.Tensor
    _host_tokens: torch.Tensor
    _host_finite: torch.Tensor
    _scores: Scores | None
    _scored: tuple[int, ...]
    accepted: torch.Tensor | None = None
    _host_accepted: torch.Tensor | None = None
    _begins: Sequence[int] = ()

    def to_host(self) -> list[SampledToken]:
        """One SampledToken per row (with drafts: per position), in order. Enqueues nothing on the device."""
        logprobs: dict[int, TokenLogprob] = {}
        if self._scores is not None:
            logprobs = dict(zip(self._scored, self._scores.to_host(), strict=True))
        return [
            SampledToken(token, logprobs.get(row)) if finite else SampledToken(token, error=NON_FINITE)
            for row, (token, finite) in enumerate(
                zip(self._host_tokens.tolist(), self._host_finite.tolist(), strict=True)
            )
        ]

    def accepted_to_host(self) -> list[tuple[SampledToken, ...]]:
        """The tokens of each row that count, in a step with drafts. Enqueues nothing on the device."""
        assert self._host_accepted is not None
        tokens, accepted = self.to_host(), self._host_accepted.tolist()
        return [tuple(tokens[begin : begin + count]) for begin, count in zip(self._begins, accepted, strict=True)]


@dataclass(frozen=True, slots=True)
class _SamplingMetadata:
    """The sampling parameters of a batch, on the host and on the device; rebuilt when its rows or requests change."""

    slots: tuple[int, ...]
    version: int
    slot_array: npt.NDArray[np.int64]
    seeds: npt.NDArray[np.int64]
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    zeros: torch.Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    largest_top_k: int
    scored: tuple[int, ...]
    scored_index: torch.Tensor
    tops: tuple[int, ...]
    listed: ListedTokens | None


class Sampler:
    """Samples one token per row, or per position of a row with drafts. Used from one thread."""

    def __init__(self, backend: SamplingBackend, state: SamplerState) -> None:
        self.state = state
        self._backend = backend
        self._greedy = backend if isinstance(backend, GreedySampling) else None
        self._noise = SlotNoise(state.max_slots)
        self._device_noise: DeviceNoise | None = None  # made by the first step with drafts that needs it
        self._latest: _SamplingMetadata | None = None

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SampledBatch:
        """Sample the token at each row's position, and count it in the state.

        logits: float32 [rows, vocab], unchanged. A row gets an error if a logit is NaN or +inf, or if none
        is above -inf; it does not affect other rows.
        """
        if logits.shape[0] != len(rows):
            raise InternalError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
        metadata = self._metadata(tuple([row.slot for row in rows]))
        active = self._active_processors(rows)
        noise = self._draw_on_host(rows, metadata)
        if metadata.all_greedy and not active and self._greedy is not None:
            tokens, finite = self._greedy.most_likely(logits)
        else:
            processed = _processed(logits, active)
            finite = processed.amax(-1).isfinite()
            tokens = self._backend.sample(self._batch(processed, noise, metadata))
            tokens = tokens.masked_fill(~finite, 0)
        self.state.observe(metadata.slots, tokens)
        return self._with_host_copies(logits, tokens, finite, metadata)

    def sample_drafts(self, logits: torch.Tensor, rows: Sequence[SampleRow], drafts: DraftRows) -> SampledBatch:
        """Sample every position of rows with drafts, and count the accepted tokens in the state.

        logits: [positions, vocab]; `rows` has one entry per position. Errors are those of `sample`; an error at a
        position whose token is not accepted is dropped with the token.
        """
        if logits.shape[0] != len(rows):
            raise InternalError(f"{logits.shape[0]} rows of logits for {len(rows)} positions to sample")
        metadata, shape = self._metadata(tuple([row.slot for row in rows])), drafts.shape
        active = self._active_processors(rows)
        if metadata.all_greedy and not active and self._greedy is not None:
            tokens, finite = self._greedy.most_likely(logits)
        else:
            processed = logits.to(torch.float32, copy=True)
            for processor, prepared in active:
                processor.apply_drafts(processed, prepared, drafts)
            finite = processed.amax(-1).isfinite()
            noise = self._draw_on_device(rows, metadata, drafts)
            tokens = self._backend.sample(self._batch(processed, noise, metadata)).masked_fill(~finite, 0)
        accepted = shape.accepted(drafts.fed, tokens)
        self.state.observe_kept(metadata.slots, tokens, shape.kept(accepted))
        return self._with_host_copies(logits, tokens, finite, metadata, accepted=accepted, begins=shape.begins)

    def _draw_on_device(
        self, rows: Sequence[SampleRow], metadata: _SamplingMetadata, drafts: DraftRows
    ) -> torch.Tensor | None:
        """Noise on the device, float64 [positions]; None if no row needs any."""
        if metadata.all_greedy:
            return None
        if self._device_noise is None:
            self._device_noise = DeviceNoise(self.state.max_slots, self.state.transfers)
        earliest = [row.position - row.drafts_in_flight for row in rows]
        latest = [row.position for row in rows]
        self._device_noise.ensure(metadata.slots, metadata.seeds.tolist(), earliest, latest)
        slots = self.state.transfers.upload(metadata.slot_array)
        return self._device_noise.draw(slots, drafts.positions)

    def _active_processors(self, rows: Sequence[SampleRow]) -> list[tuple[LogitsProcessor, Any]]:
        """The processors that are active for these rows, with the results of their `prepare`."""
        all_prepared = [(processor, processor.prepare(rows)) for processor in self.state.processors]
        return [(processor, prepared) for processor, prepared in all_prepared if prepared is not None]

    def _draw_on_host(self, rows: Sequence[SampleRow], metadata: _SamplingMetadata) -> torch.Tensor | None:
        """Noise on the host, float64 [rows]; None if no row needs any."""
        if metadata.all_greedy:
            return None
        positions = np.fromiter((row.position for row in rows), dtype=np.int64, count=len(rows))
        return torch.from_numpy(self._noise.draw(metadata.slot_array, metadata.seeds, positions))

    def _batch(self, logits: torch.Tensor, noise: torch.Tensor | None, metadata: _SamplingMetadata) -> SamplingBatch:
        uniform = metadata.zeros if noise is None else self.state.transfers.upload(noise)
        return SamplingBatch(
            logits=logits,
            temperature=metadata.temperature,
            top_k=metadata.top_k,
            top_p=metadata.top_p,
            min_p=metadata.min_p,
            uniform=uniform,
            all_greedy=metadata.all_greedy,
            any_top_k=metadata.any_top_k,
            any_top_p=metadata.any_top_p,
            any_min_p=metadata.any_min_p,
            largest_top_k=metadata.largest_top_k,
        )

    def _metadata(self, slots: tuple[int, ...]) -> _SamplingMetadata:
        latest = self._latest
        if latest is None or latest.version != self.state.version or latest.slots != slots:
            latest = self._latest = self._build(slots)
        return latest

    def _build(self, slots: tuple[int, ...]) -> _SamplingMetadata:
        state, transfers = self.state, self.state.transfers
        at = np.asarray(slots, dtype=np.int64)
        temperature, top_k, top_p, min_p = state.temperature[at], state.top_k[at], state.top_p[at], state.min_p[at]
        random = temperature > 0.0
        limits = top_k[random & (top_k < state.vocab_size)]
        params = [self._params(slot) for slot in slots]
        tops = {row: one.logprobs for row, one in enumerate(params) if one.logprobs is not None}
        return _SamplingMetadata(
            slots=slots,
            version=state.version,
            slot_array=at,
            seeds=state.seed[at],
            temperature=transfers.upload(temperature),
            top_k=transfers.upload(top_k),
            top_p=transfers.upload(top_p),
            min_p=transfers.upload(min_p),
            zeros=torch.zeros(len(slots), dtype=torch.float64, device=transfers.device),
            all_greedy=not random.any(),
            any_top_k=limits.size > 0,
            any_top_p=bool((top_p[random] < 1.0).any()),
            any_min_p=bool((min_p[random] > 0.0).any()),
            largest_top_k=int(limits.max(initial=0)),
            scored=tuple(tops),
            scored_index=transfers.upload_integers(list(tops)),
            tops=tuple(tops.values()),
            listed=listed_tokens([params[row].logprob_token_ids for row in tops], transfers),
        )

    def _params(self, slot: int) -> SamplingParams:
        params = self.state.params[slot]
        if params is None:
            raise InternalError(f"a token must be sampled for slot {slot}, but the slot has no request")
        return params

    def _with_host_copies(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        finite: torch.Tensor,
        metadata: _SamplingMetadata,
        *,
        accepted: torch.Tensor | None = None,
        begins: Sequence[int] = (),
    ) -> SampledBatch:
        """The result of a step: computes log-probabilities where requested, and requests the copies to the host."""
        scores, transfers = None, self.state.transfers
        if len(metadata.scored) == len(metadata.slots):
            scores = score(logits, tokens, transfers, metadata.tops, metadata.listed)
        elif metadata.scored:
            index = metadata.scored_index
            scored = logits.index_select(0, index), tokens.index_select(0, index)
            scores = score(*scored, transfers, metadata.tops, metadata.listed)
        return SampledBatch(
            tokens,
            transfers.download(tokens),
            transfers.download(finite),
            scores,
            metadata.scored,
            accepted,
            None if accepted is None else transfers.download(accepted),
            begins,
        )


def _processed(logits: torch.Tensor, active: Sequence[tuple[LogitsProcessor, Any]]) -> torch.Tensor:
    """float32 logits after these processors; the argument itself if it is float32 and there are no processors."""
    if not active:
        return logits.float()
    processed = logits.to(torch.float32, copy=True)
    for processor, prepared in active:
        processor.apply(processed, prepared)
    return processed

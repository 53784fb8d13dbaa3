"""What each rank process does with an exchange of rows with experts; returns plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.platform.expert_exchange import (
    ExactExchange,
    ExchangeSizes,
    ExpertExchange,
    FixedExchange,
    through_experts,
)
from srv_cpu.communicator import CpuCommunicator
from srv_kernels.cpu.captured_graph import CapturedGraph, GraphMemoryPool
from srv_kernels.expert_oracles import experts as oracle
from srv_kernels.expert_reference import experts

LIMIT = 6  # tokens per call of an exchange
HIDDEN, INNER = 24, 16
Tokens = tuple[Tensor, Tensor, Tensor]


def weights_of(count: int) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2 I, H] and down [E, H, I] of all experts, in float32."""
    generator = torch.Generator().manual_seed(count)
    scale = HIDDEN**-0.5
    return (
        torch.randn(count, 2 * INNER, HIDDEN, generator=generator) * scale,
        torch.randn(count, HIDDEN, INNER, generator=generator) * scale,
    )


def tokens_of(rank: int, count: int, experts: int, top_k: int, kind: str, dtype: torch.dtype) -> Tokens:
    """The tokens of a rank, with experts that are "random", "one" (all tokens have the last) or "few" (many are -1)."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    x = torch.randn(count, HIDDEN, generator=generator).to(dtype)
    chosen = torch.rand(count, experts, generator=generator).argsort(1)[:, :top_k]
    if kind == "one":
        others = torch.rand(count, experts - 1, generator=generator).argsort(1)[:, : top_k - 1]
        chosen = torch.cat([torch.full((count, 1), experts - 1), others], 1)
    if kind == "few":
        chosen = chosen.masked_fill(torch.rand(count, top_k, generator=generator) < 0.6, -1)
    return x, chosen.to(torch.int32), torch.rand(count, top_k, generator=generator)


def expected(tokens: Tokens, count: int) -> Tensor:
    """In float64, by the oracle of op experts, on all experts."""
    x, ids, weights = tokens
    gate_up, down = weights_of(count)
    return oracle(x.double(), ids.long(), weights.double(), gate_up.double(), down.double(), None, None, "silu")


@contextmanager
def joined(group: RankGroup) -> Iterator[CpuCommunicator]:
    communicator = CpuCommunicator(group)
    try:
        yield communicator
        communicator.barrier()  # gloo may end the operations of ranks that are not as far
    finally:
        communicator.abort()


def own_experts(group: RankGroup, count: int, dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    begin, end = group.share(count)
    gate_up, down = (each[begin:end].to(dtype) for each in weights_of(count))
    return lambda rows, ids, weights: experts(rows, ids, weights, gate_up, down, None, None, "silu")


def exchange(
    group: RankGroup, form: str, count: int, top_k: int, kind: str, tokens: list[int], dtype: torch.dtype
) -> tuple[Tensor, list[int], list[int]]:
    """What the experts make of this rank's tokens; of each round, the sum of the counts, and the ids that are none."""
    seen: list[Tensor] = []
    compute = own_experts(group, count, dtype)

    def counted(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen.append(ids)
        return compute(rows, ids, weights)

    with joined(group) as communicator, torch.inference_mode():
        made = make(form, communicator, group, count, top_k)
        own = tokens_of(group.rank, tokens[group.rank], count, top_k, kind, dtype)
        result = through_experts(made, *own, counted, max(tokens))
    return result, [int((ids >= 0).sum()) for ids in seen], [int((ids < 0).sum()) for ids in seen]


def make(form: str, communicator: CpuCommunicator, group: RankGroup, count: int, top_k: int) -> ExpertExchange:
    kind = {"exact": ExactExchange, "fixed": FixedExchange}[form]
    return kind(communicator, group, ExchangeSizes(count, top_k, HIDDEN, LIMIT))


def too_many(group: RankGroup, form: str) -> str:
    with joined(group) as communicator:
        made = make(form, communicator, group, 6, 2)
        try:
            made.dispatch(*tokens_of(0, LIMIT + 1, 6, 2, "random", torch.float32))
        except ValueError as error:
            return str(error)
    return ""


def replay(group: RankGroup) -> list[float]:
    """The errors of replays of a captured step with other tokens than those of the capture."""
    count, top_k, errors = 6, 2, []
    with joined(group) as communicator, torch.inference_mode():
        made = make("fixed", communicator, group, count, top_k)
        compute = own_experts(group, count, torch.float32)
        x, ids, weights = (each.clone() for each in tokens_of(group.rank, 5, count, top_k, "random", torch.float32))
        out, graph = torch.zeros(5, HIDDEN), CapturedGraph(GraphMemoryPool())
        with graph:
            dispatched = made.dispatch(x, ids, weights)
            received = dispatched.rows * 2.0  # in place of experts, whose reference reads counts on the host
            out.copy_(made.combine(received, dispatched))
        for seed, kind in enumerate(("random", "one", "few"), 1):
            own = tokens_of(group.rank + 10 * seed, 5, count, top_k, kind, torch.float32)
            for target, value in zip((x, ids, weights), own, strict=True):
                target.copy_(value)
            graph.replay()
            factor = own[2].masked_fill(own[1] < 0, 0.0).sum(1, keepdim=True)
            errors.append(float((out - 2.0 * own[0] * factor).abs().max()))
    del compute
    return errors

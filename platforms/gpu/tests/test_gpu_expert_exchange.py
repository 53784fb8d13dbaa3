"""How DeepEP is called, on a stand-in with its documented semantics, between ranks that are threads on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every import every
from thread_ranks import ThreadCommunicator, on_ranks
from torch import Tensor

from srv.dist.group import RankGroup
from srv.platform.expert_exchange import ExchangeSizes, ExpertExchange, through_experts
from srv_gpu.expert_exchange import LowLatencyExchange, NormalExchange, make_buffer, why_not

RANKS, HIDDEN, EXPERTS, TOP_K, LIMIT = 2, 2048, 4, 2, 3
SIZES = ExchangeSizes(EXPERTS, TOP_K, HIDDEN, LIMIT)


class Config:
    """The sizes that a configuration of the library asks for."""

    def get_nvl_buffer_size_hint(self, row: int, ranks: int) -> int:
        return row * ranks

    def get_rdma_buffer_size_hint(self, row: int, ranks: int) -> int:
        return 0


class StandIn:
    """`deep_ep.Buffer`, as the library documents it, over what every rank gathers from all others.

    Its objects are exchanged through `comm`, and tensors through the communicator behind it.
    """

    def __init__(
        self,
        group: None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        comm: Any = None,
    ) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        handle = bytearray([self.rank] * (3 + self.rank))  # of another length on each rank
        assert comm.allgather(self.rank) == list(range(self.size))
        assert comm.allgather(handle) == [bytearray([rank] * (3 + rank)) for rank in range(self.size)]
        assert comm.allgather(handle if self.rank == 0 else None) == [bytearray(3), *[None] * (self.size - 1)]
        assert num_nvl_bytes == HIDDEN * 2 * self.size
        assert num_rdma_bytes == LIMIT * HIDDEN * self.size * EXPERTS
        self._gather = comm._communicator.all_gather

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return tokens * hidden * ranks * experts

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        chosen = (topk_idx.unsqueeze(2) == torch.arange(num_experts)).any(1)
        at_rank = chosen.view(len(topk_idx), self.size, num_experts // self.size).any(2)
        return at_rank.sum(0).int(), None, chosen.sum(0).int(), at_rank, None

    def dispatch(
        self,
        x: Tensor,
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
    ) -> tuple[Any, ...]:
        assert x.dtype is torch.bfloat16
        assert topk_idx.dtype is torch.int64
        assert topk_weights.dtype is torch.float32
        local = len(num_tokens_per_expert) // self.size
        tokens, ids, weights = (self._padded(each) for each in (x, topk_idx + 1, topk_weights))
        own = ids - 1 - self.rank * local
        own = torch.where((own >= 0) & (own < local), own, -1)
        at = (own >= 0).any(1)
        factors = weights.masked_fill(own < 0, 0.0)
        counts = [int((own == expert).sum()) for expert in range(local)]
        return tokens[at], own[at], factors[at], counts, (at, len(x)), None

    def combine(self, x: Tensor, handle: Any) -> tuple[Any, ...]:
        at, tokens = handle
        sent = x.new_zeros(len(at), x.shape[1])
        sent[at] = x
        everything = self._gather(sent).view(self.size, self.size, LIMIT, -1)
        return everything[:, self.rank].float().sum(0).to(x.dtype)[:tokens], None, None

    def clean_low_latency_buffer(self, tokens: int, hidden: int, experts: int) -> None:
        assert (tokens, hidden, experts) == (LIMIT, HIDDEN, EXPERTS)

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, most: int, num_experts: int, use_fp8: bool = True
    ) -> tuple[Any, ...]:
        assert not use_fp8
        local = num_experts // self.size
        tokens, ids = self._padded(x), self._padded(topk_idx + 1) - 1
        rows = torch.full((local, most * self.size, x.shape[1]), torch.nan, dtype=x.dtype)
        places = [(ids == self.rank * local + expert).any(1).nonzero().view(-1) for expert in range(local)]
        for expert, found in enumerate(places):
            rows[expert, : len(found)] = tokens[found]
        return rows, torch.tensor([len(each) for each in places], dtype=torch.int32), places, None, None

    def low_latency_combine(self, x: Tensor, topk_idx: Tensor, weights: Tensor, handle: Any) -> tuple[Any, ...]:
        local, every = len(x), torch.zeros(len(x), LIMIT * self.size, x.shape[2], dtype=x.dtype)
        for expert, places in enumerate(handle):
            every[expert, places] = x[expert, : len(places)]
        results = self._gather(every).view(self.size * local, self.size, LIMIT, -1)[:, self.rank]
        total = torch.zeros(len(topk_idx), x.shape[2])
        for token, ids in enumerate(topk_idx.tolist()):
            for place, expert in enumerate(ids):
                if expert >= 0:
                    total[token] += results[expert, token].float() * weights[token, place]
        return total.to(x.dtype), None, None

    def _padded(self, tensor: Tensor) -> Tensor:
        padded = tensor.new_zeros(LIMIT, tensor.shape[1])
        padded[: len(tensor)] = tensor
        return self._gather(padded).flatten(0, 1)


class Library:
    Buffer = StandIn


@pytest.mark.parametrize("form", ["normal", "low latency"])
@every("counts", [(3, 3), (1, 2), (0, 3), (5, 0)])
def test_results_are_those_of_all_experts(form: str, counts: tuple[int, int]) -> None:
    def run(group: RankGroup, communicator: ThreadCommunicator) -> float:
        buffer = make_buffer(Library, communicator, group, torch.device("cpu"), SIZES, low_latency=True)
        exchange: ExpertExchange = NormalExchange(buffer, RANKS, SIZES)
        if form == "low latency":
            exchange = low_latency = LowLatencyExchange(buffer, RANKS, SIZES)
            low_latency.clean()
        generator, count = torch.Generator().manual_seed(group.rank), counts[group.rank]
        x = torch.randn(count, HIDDEN, generator=generator).to(torch.bfloat16)
        ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].to(torch.int32)
        ids[:1, 0] = -1
        weights = torch.rand(count, TOP_K, generator=generator)

        def compute(rows: Tensor, local: Tensor, factors: Tensor) -> Tensor:
            """Expert e multiplies by e + 1; ids of -1 contribute nothing."""
            scale = torch.where(local < 0, 0.0, (local + 1 + 2 * group.rank) * factors).sum(1, keepdim=True)
            return torch.where((local >= 0).any(1, keepdim=True), rows.float() * scale, 0.0).to(rows.dtype)

        out = through_experts(exchange, x, ids, weights, compute, max(counts))
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        wanted = x.double() * ((ids + 1) * weights).sum(1, keepdim=True)
        return float(((out.double() - wanted).abs() / wanted.abs().clamp(min=1.0)).max()) if count else 0.0

    assert max(on_ranks(RANKS, run)) < 0.02


@every(
    ("sizes", "ranks", "dtype", "normal", "reason"),
    [
        (SIZES, 2, torch.bfloat16, True, None),
        (SIZES, 2, torch.bfloat16, False, None),
        (SIZES, 2, torch.float16, True, "its rows are bfloat16, not float16"),
        (SIZES, 3, torch.bfloat16, False, "4 experts cannot be divided among 3 ranks"),
        (ExchangeSizes(6, 2, 64, 9), 6, torch.bfloat16, True, "it has no configuration for 6 ranks, but for 2, 4, 8"),
        (ExchangeSizes(4, 2, 2048, 1025), 2, torch.bfloat16, False, "it takes at most 1024 tokens per rank and call"),
        (ExchangeSizes(4, 2, 64, 8), 2, torch.bfloat16, False, "it has kernels for rows of 2048, 2560"),
    ],
)
def test_limits_of_the_library(
    sizes: ExchangeSizes, ranks: int, dtype: torch.dtype, normal: bool, reason: str | None
) -> None:
    found = why_not(sizes, ranks, dtype, normal=normal)
    assert found == reason or (reason and found and found.startswith(reason))

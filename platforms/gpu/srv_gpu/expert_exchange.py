"""DeepEP on NVIDIA GPUs as an `ExpertExchange`: its normal kernels for prefill, low latency for captured steps.

    normal        host waits for counts    a row per token and rank; the rank adds the results of its experts, weighted
    low latency   fixed sizes              a row per token and expert; results are weighted and added on its rank

The buffer exchanges the handles of its memory through a group's communicator, in place of torch.distributed's global
groups. Rows travel in bfloat16. The adapter has run on a stand-in for the library with its documented semantics only.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.platform.expert_exchange import Dispatched, ExchangeSizes, check_tokens
from srv.platform.interface import Communicator

LOW_LATENCY_TOKENS = 1024  # per rank and call: a tag in the kernels between nodes has no space for more
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)  # that kernels are compiled for
NORMAL_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # that the library has a configuration for
_WIDTH = 2  # bytes of bfloat16


def why_not(sizes: ExchangeSizes, ranks: int, dtype: torch.dtype, *, normal: bool) -> str | None:
    """None, or a clause that says why the library cannot exchange rows of such a mixture."""
    if dtype is not torch.bfloat16:
        return f"its rows are bfloat16, not {str(dtype).removeprefix('torch.')}"
    if sizes.experts % ranks:
        return f"{sizes.experts} experts cannot be divided among {ranks} ranks"
    if normal:
        listed = ", ".join(map(str, NORMAL_RANKS))
        return None if ranks in NORMAL_RANKS else f"it has no configuration for {ranks} ranks, but for {listed}"
    if sizes.max_tokens > LOW_LATENCY_TOKENS:
        return f"it takes at most {LOW_LATENCY_TOKENS} tokens per rank and call, not {sizes.max_tokens}"
    if sizes.hidden not in LOW_LATENCY_HIDDEN:
        return f"it has kernels for rows of {', '.join(map(str, LOW_LATENCY_HIDDEN))} elements, not {sizes.hidden}"
    return None


class Handles:
    """What the library asks an mpi4py communicator for: objects of all ranks, here None, integers and bytes."""

    def __init__(self, communicator: Communicator, group: RankGroup, device: torch.device) -> None:
        self._communicator, self._group, self._device = communicator, group, device

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.size

    def allgather(self, value: int | bytearray | None) -> list[int | bytearray | None]:
        own = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        lengths = self._communicator.all_gather(torch.tensor([len(own)]).to(self._device)).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        gathered = self._communicator.all_gather(padded.to(self._device)).cpu()
        found = [
            msgspec.msgpack.decode(bytes(row[:size].tolist())) for row, size in zip(gathered, lengths, strict=True)
        ]
        return [bytearray(each) if isinstance(each, bytes) else each for each in found]


def make_buffer(
    library: Any,
    communicator: Communicator,
    group: RankGroup,
    device: torch.device,
    sizes: ExchangeSizes,
    *,
    low_latency: bool,
) -> Any:
    """The library's buffer of a group, for the normal kernels and, if asked for, the others; all members make theirs.

    library: the module deep_ep. sizes: those of the captured steps, with low_latency.
    """
    kind, ranks, row = library.Buffer, group.size, sizes.hidden * _WIDTH
    configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
    within = max(each.get_nvl_buffer_size_hint(row, ranks) for each in configs)
    between = max(each.get_rdma_buffer_size_hint(row, ranks) for each in configs)
    if low_latency:
        hint = kind.get_low_latency_rdma_size_hint(sizes.max_tokens, sizes.hidden, ranks, sizes.experts)
        between = max(between, hint)
    return kind(
        None,
        within,
        between,
        low_latency_mode=low_latency,
        num_qps_per_rank=sizes.local(ranks),
        comm=Handles(communicator, group, device),
    )


class NormalExchange:
    """Implements `srv.platform.expert_exchange.ExpertExchange`."""

    captured = False

    def __init__(self, buffer: Any, ranks: int, sizes: ExchangeSizes) -> None:
        self._buffer, self._sizes = buffer, sizes
        self._local = sizes.local(ranks)

    @property
    def max_tokens(self) -> int:
        return self._sizes.max_tokens

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        check_tokens(x, self.max_tokens)
        ids = expert_ids.long()
        per_rank, per_node, per_expert, at_rank, _ = self._buffer.get_dispatch_layout(ids, self._sizes.experts)
        rows, named, factors, counts, handle, _ = self._buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=at_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights.float(),
        )
        return Dispatched(rows, named.long(), factors, torch.tensor(counts).to(x.device), handle)

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        combined: Tensor = self._buffer.combine(results.contiguous(), dispatched.handle)[0]
        return combined


class LowLatencyExchange:
    """Implements `srv.platform.expert_exchange.ExpertExchange`. `clean` the buffer after normal kernels used it."""

    captured = True

    def __init__(self, buffer: Any, ranks: int, sizes: ExchangeSizes) -> None:
        self._buffer, self._sizes = buffer, sizes
        self._local = sizes.local(ranks)

    @property
    def max_tokens(self) -> int:
        return self._sizes.max_tokens

    def clean(self) -> None:
        """Prepare the buffer, which the normal kernels leave dirty; on all ranks."""
        self._buffer.clean_low_latency_buffer(self._sizes.max_tokens, self._sizes.hidden, self._sizes.experts)

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        check_tokens(x, self.max_tokens)
        ids, factors = expert_ids.long(), weights.float()
        rows, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            x.contiguous(), ids, self._sizes.max_tokens, self._sizes.experts, use_fp8=False
        )
        local, space, hidden = rows.shape
        places = torch.arange(space, device=x.device).expand(local, space)
        experts = torch.arange(local, device=x.device).unsqueeze(1)
        named = torch.where(places < counts.unsqueeze(1), experts, -1).reshape(-1, 1)
        ones = torch.ones(local * space, 1, dtype=torch.float32, device=x.device)
        return Dispatched(rows.reshape(-1, hidden), named, ones, counts.long(), (ids, factors, handle, rows.shape))

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        ids, factors, handle, shape = dispatched.handle
        combined: Tensor = self._buffer.low_latency_combine(results.reshape(shape), ids, factors, handle)[0]
        return combined

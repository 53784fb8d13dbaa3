"""`deep_ep` of Ascend (sgl-kernel-npu): dispatch and combine of experts between processes that simulate one card each.

The documented semantics by the documented limits, computed from what every rank gathers from all others: a simulator
need not save traffic. Rows are packed, sorted by expert of this rank, then by rank and token; each is for one expert.
Results are weighted and added on the rank of the token. Events and hooks are dummies, as in the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from srv_npu_simulator.device import Accelerator
from srv_npu_simulator.operators.checks import Rules, check_placement

# The sizes of groups that `Buffer.get_dispatch_config` has a configuration for.
CONFIGURED = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
_EXPERTS, _TOP_K = 512, 16
_HIDDEN = 7168
_NORMAL_TOKENS, _LOW_LATENCY_TOKENS = 8192, 512
_FUSED_TOKENS, _FUSED_HIDDEN, _FUSED_TOP_K = 256, 512, 12
_INT8 = 127.0


class Event:
    """`EventOverlap`: an operation is in the order of the current stream anyway."""

    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class Buffer:
    """`deep_ep.Buffer`; `buffer_class` binds it to a card. group: with `rank()`, `size()` and `_get_backend(device)`,
    which returns a group of HCCL with a communicator of its own: no other operation may use it.
    """

    accelerator: Accelerator

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
    ) -> None:
        self.rank, self.group_size = group.rank(), group.size()
        self.low_latency_mode = low_latency_mode
        self._group = group._get_backend(torch.device("npu"))

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes: what a published page states for bfloat16 and as many experts per token as a rank has."""
        return 2 * (num_max_dispatch_tokens_per_rank * num_experts * hidden * 2 + (2 << 20))

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Event]:
        """Tokens for each rank (int32), None on one node, tokens for each expert (int32), whether a token goes to a
        rank (int32 [tokens, ranks]), and an event.
        """
        rules = Rules("get_dispatch_layout")
        check_placement(rules.operator, ("topk_idx",), (topk_idx,), {})
        rules.dtype("topk_idx", topk_idx, (torch.int64,))
        experts = torch.arange(num_experts, device=topk_idx.device)
        chosen = (topk_idx.unsqueeze(2) == experts).any(1)  # [tokens, experts]
        at_rank = chosen.unflatten(1, (self.group_size, num_experts // self.group_size)).any(2).int()
        return at_rank.sum(0).int(), None, chosen.sum(0).int(), at_rank, Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, list[int], Any, Event]:
        """Rows, their tokens' experts and weights, the host's list of rows per expert, a handle, and an event."""
        rules = Rules("dispatch")
        for name, value in (
            ("num_tokens_per_rank", num_tokens_per_rank),
            ("is_token_in_rank", is_token_in_rank),
            ("num_tokens_per_expert", num_tokens_per_expert),
            ("topk_idx", topk_idx),
            ("topk_weights", topk_weights),
        ):
            rules.require(value is not None, name, "missing", "must be given: see get_dispatch_layout")
        rules.absent(handle=handle)
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        rules.require(
            self.group_size in CONFIGURED, "group", f"of {self.group_size} ranks", f"must have one of {CONFIGURED}"
        )
        experts = len(num_tokens_per_expert)
        self._check(rules, x, topk_idx, experts, _NORMAL_TOKENS)
        if self.accelerator.soc.key == "a3":
            rules.require(
                x.shape[1] >= 1024, "x", f"of shape {tuple(x.shape)}", "must have at least 1024 columns on A3"
            )
        # The host waits, as that of the library does.
        most = max(1, int(self._gathered(torch.tensor([len(x)]).to(x.device)).max()))
        rows, order, counts = self._received(x, topk_idx, experts, most)
        kept = int(counts.sum())
        tokens = order[:kept] // topk_idx.shape[1]
        ids = self._gathered(_padded(topk_idx, most, -1)).flatten(0, 1)[tokens]
        weights = self._gathered(_padded(topk_weights, most, 0)).flatten(0, 1)[tokens]
        made = (order[:kept], kept, most, topk_idx, topk_weights)
        return rows[:kept].clone(), ids, weights, counts.tolist(), made, Event()

    def combine(self, x: Tensor, handle: Any) -> tuple[Tensor, None, Event]:
        """The rows of this rank's tokens, weighted by what `dispatch` was given."""
        rules = Rules("combine")
        order, kept, most, topk_idx, topk_weights = handle
        check_placement(rules.operator, ("x",), (x,), {})
        rules.require(len(x) == kept, "x", f"of {len(x)} rows", f"must have the {kept} rows that were dispatched")
        return self._combined(x, order, most, topk_idx, topk_weights), None, Event()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, Any, Event, Callable[[], None]]:
        """Rows (with use_fp8 as int8, and float32 scales of rows), the number of each expert's (int32), a handle."""
        rules, most = Rules("low_latency_dispatch"), num_max_dispatch_tokens_per_rank
        rules.require(not use_ue8m0, "use_ue8m0", "True", "must be False before A5")
        self._check(rules, x, topk_idx, num_experts, _LOW_LATENCY_TOKENS)
        rules.require(len(x) > 0, "x", "without rows", "must have at least one")
        rule = f"must be at most num_max_dispatch_tokens_per_rank, {most}"
        rules.require(len(x) <= most, "x", f"of {len(x)} rows", rule)
        rows, order, counts = self._received(x, topk_idx, num_experts, most)
        received: Any = _quantized(rows) if use_fp8 else rows
        return received, counts.int(), (order, most, x.shape[1], num_experts, counts), Event(), _no_hook

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
    ) -> tuple[Tensor, Event, Callable[[], None]]:
        """The rows of this rank's tokens, weighted."""
        rules = Rules("low_latency_combine")
        order, most, hidden, _, _ = handle
        check_placement(rules.operator, ("x", "topk_idx", "topk_weights"), (x, topk_idx, topk_weights), {})
        rules.shape("x", x, (len(order), hidden))
        rules.dtype("topk_weights", topk_weights, (torch.float32,))
        return self._combined(x, order, most, topk_idx, topk_weights), Event(), _no_hook

    def fused_deep_moe(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        gmm1_permuted_weight: Tensor,
        gmm1_permuted_weight_scale: Tensor,
        gmm2_weight: Tensor,
        gmm2_weight_scale: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        quant_mode: int = 1,
        fuse_mode: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """The rows of this rank's tokens after int8 experts, and how many rows each expert of this rank had (int32).

        gmm1_permuted_weight: int8 [local, H, 2 I], with 64 columns of the gate and 64 of the other half in turn;
        gmm2_weight: int8 [local, H, I]. Scales: float32, of outputs. Rows of both products are quantized.
        """
        rules, most = Rules("fused_deep_moe"), num_max_dispatch_tokens_per_rank
        rules.require(self.accelerator.soc.key == "a3", "device", self.accelerator.soc.key, "must be a3 or newer")
        rules.require((quant_mode, fuse_mode) == (1, 1), "modes", (quant_mode, fuse_mode), "must be 1: int8, permuted")
        self._check(rules, x, topk_idx, num_experts, _FUSED_TOKENS)
        rules.require(1 <= len(x) <= most, "x", f"of {len(x)} rows", f"must have 1 to {most} rows")
        rules.require(x.shape[1] >= _FUSED_HIDDEN, "x", f"of shape {tuple(x.shape)}", "must have at least 512 columns")
        top_k, width = topk_idx.shape[1], gmm1_permuted_weight.shape[2]
        rules.require(top_k <= _FUSED_TOP_K, "topk_idx", f"of {top_k} experts per token", "must have at most 12")
        rules.require(1024 <= width <= 6144, "gmm1_permuted_weight", f"of width {width}", "must have 1024 to 6144")
        rules.dtype("gmm1_permuted_weight", gmm1_permuted_weight, (torch.int8,))
        rules.dtype("gmm2_weight", gmm2_weight, (torch.int8,))
        rules.shape("gmm2_weight", gmm2_weight, (len(gmm1_permuted_weight), x.shape[1], width // 2))
        rows, order, counts = self._received(x, topk_idx, num_experts, most)
        ends = counts.cumsum(0)
        experts = (torch.arange(len(rows), device=x.device).unsqueeze(1) >= ends).sum(1)
        results = torch.zeros(len(rows), x.shape[1], dtype=torch.float32, device=x.device)
        first = _natural(gmm1_permuted_weight), _natural(gmm1_permuted_weight_scale)
        for expert in range(len(counts)):
            both = _product(rows.float(), first[0][expert], first[1][expert])
            gate, up = both.chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            computed = _product(inner, gmm2_weight[expert].transpose(0, 1), gmm2_weight_scale[expert])
            results = torch.where((experts == expert).unsqueeze(1), computed, results)
        return self._combined(results.to(x.dtype), order, most, topk_idx, topk_weights), counts.int()

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing is left in a buffer here."""

    def _check(self, rules: Rules, x: Tensor, topk_idx: Tensor, experts: int, tokens: int) -> None:
        check_placement(rules.operator, ("x", "topk_idx"), (x, topk_idx), {})
        rules.dims("x", x, 2)
        rules.dtype("x", x, (torch.bfloat16, torch.float16))
        rules.contiguous("x", x)
        rules.dtype("topk_idx", topk_idx, (torch.int64,))
        rules.shape("topk_idx", topk_idx, (len(x), topk_idx.shape[1]), "as many rows as x")
        described = f"of shape {tuple(x.shape)}"
        rules.require(len(x) <= tokens, "x", described, f"must have at most {tokens} rows")
        rules.require(x.shape[1] <= _HIDDEN, "x", described, f"must have at most {_HIDDEN} columns")
        rules.require(x.shape[1] % 32 == 0, "x", described, "must have a multiple of 32 columns")
        rule = f"must be at most {_EXPERTS}, and divisible by the {self.group_size} ranks"
        rules.require(experts <= _EXPERTS and experts % self.group_size == 0, "num_experts", experts, rule)
        top_k = topk_idx.shape[1]
        rules.require(1 <= top_k <= _TOP_K, "topk_idx", f"of {top_k} experts per token", f"must have 1 to {_TOP_K}")

    def _received(self, x: Tensor, topk_idx: Tensor, experts: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows for the experts of this rank, as many as there can be; of each, the number of its pair of a token and an
        expert among those of all ranks; and how many each expert has, int64.
        """
        local, top_k = experts // self.group_size, topk_idx.shape[1]
        tokens = self._gathered(_padded(x, most, 0)).flatten(0, 1)
        own = self._gathered(_padded(topk_idx, most, -1)).reshape(-1) - self.rank * local
        keys = torch.where((own >= 0) & (own < local), own, local)
        space = self.group_size * most * min(top_k, local)
        order = keys.argsort(stable=True)[:space]
        counts = (keys.unsqueeze(1) == torch.arange(local, device=x.device)).sum(0)
        named = keys.index_select(0, order) < local
        return tokens.index_select(0, order // top_k), torch.where(named, order, -1), counts

    def _combined(self, x: Tensor, order: Tensor, most: int, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """order: the pair of each row of x, -1 for none."""
        top_k, every = topk_idx.shape[1], self.group_size * most * topk_idx.shape[1]
        pairs = x.new_zeros(every + 1, x.shape[1]).index_copy_(0, torch.where(order < 0, every, order), x)
        sent = pairs[:-1].contiguous()
        returned = torch.empty_like(sent)
        self._group.alltoall_base(returned, sent, [], []).wait()
        # Each pair has a result from one rank, and zeros from the others.
        results = returned.view(self.group_size, most, top_k, -1).sum(0)[: len(topk_idx)]
        factors = topk_weights.masked_fill(topk_idx < 0, 0.0)
        total = torch.zeros(len(topk_idx), x.shape[1], dtype=torch.float32, device=x.device)
        for index in range(top_k):
            total += results[:, index].float() * factors[:, index, None]
        return total.to(x.dtype)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """[ranks, *shape]."""
        gathered = tensor.new_empty((self.group_size, *tensor.shape))
        self._group._allgather_base(gathered, tensor.contiguous()).wait()
        return gathered


def buffer_class(accelerator: Accelerator) -> type[Buffer]:
    """The class whose buffers are on that card."""
    return type("Buffer", (Buffer,), {"accelerator": accelerator})


def _padded(tensor: Tensor, rows: int, value: float) -> Tensor:
    padded = torch.full((rows, *tensor.shape[1:]), value, dtype=tensor.dtype, device=tensor.device)
    padded[: len(tensor)] = tensor
    return padded


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows, and their float32 scales."""
    scales = rows.float().abs().amax(1).clamp(min=1e-12) / _INT8
    return (rows.float() / scales.unsqueeze(1)).round().to(torch.int8), scales


def _product(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [R, N]: quantized rows times int8 [K, N], exact up to the scales."""
    quantized, scales = _quantized(rows)
    return (quantized.double() @ weight.double()).float() * scales.unsqueeze(1) * scale


def _natural(permuted: Tensor) -> Tensor:
    """[..., 2 I] with the whole gate before the other half, of chunks of 64 that alternate."""
    chunks = permuted.shape[-1] // 128
    return permuted.view(*permuted.shape[:-1], chunks, 2, 64).transpose(-3, -2).reshape(permuted.shape)


def _no_hook() -> None:
    """The rows have arrived already."""

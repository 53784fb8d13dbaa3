"""DeepEP of Ascend (sgl-kernel-npu) as an `ExpertExchange`: normal for prefill, low latency for captured steps.

    normal        host waits for counts    rows of all experts of this rank, packed, without padding
    low latency   fixed sizes              the same, with as many rows as there can be; the host waits for nothing
    fused         fixed sizes              dispatch, int8 experts and combine in one op (A3)

They send a row for each expert of a token, and weight and add results on the token's rank. The ops allow no other
operation in the group's communicator, so that an exchange joins one of its own; every layer uses the same. Rows travel
in the model's dtype. Several ranks have run on simulated devices only.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.errors import PlatformUnavailable
from srv.platform.expert_exchange import Dispatched, ExchangeSizes, check_tokens
from srv.platform.host import is_installed
from srv_npu.communicator import join
from srv_npu.sdk import NAME, Sdk

DEEP_EP = "deep_ep"
NORMAL_TOKENS, LOW_LATENCY_TOKENS = 8192, 512  # per rank and call, on one node
NORMAL_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)  # that the library has a configuration for
FUSED_TOKENS = 256
_FUSED_TOP_K, _FUSED_HIDDEN, _FUSED_WIDTHS = 12, 512, (1024, 6144)
_CHUNK = 64  # columns of gate and up in turn
_FRACTAL_NZ = 29
_EXPERTS, _TOP_K, _HIDDEN, _HIDDEN_MULTIPLE, _HIDDEN_A3 = 512, 16, 7168, 32, 1024


def why_not(sizes: ExchangeSizes, ranks: int, variant: str, *, normal: bool) -> str | None:
    """None, or a clause that says why the library cannot exchange rows of such a mixture. variant: "a2" or "a3"."""
    most = NORMAL_TOKENS if normal else LOW_LATENCY_TOKENS
    if sizes.max_tokens > most:
        return f"it takes at most {most} tokens per rank and call, not {sizes.max_tokens}"
    if sizes.experts > _EXPERTS or sizes.experts % ranks:
        return f"{sizes.experts} experts are more than {_EXPERTS}, or cannot be divided among {ranks} ranks"
    if sizes.top_k > _TOP_K:
        return f"{sizes.top_k} experts per token are more than {_TOP_K}"
    if sizes.hidden > _HIDDEN or sizes.hidden % _HIDDEN_MULTIPLE:
        return f"rows of {sizes.hidden} elements are longer than {_HIDDEN}, or no multiple of {_HIDDEN_MULTIPLE}"
    if normal and variant == "a3" and sizes.hidden < _HIDDEN_A3:
        return f"rows of {sizes.hidden} elements are shorter than {_HIDDEN_A3}"
    if normal and ranks not in NORMAL_RANKS:
        return f"it has no configuration for {ranks} ranks, but for {', '.join(map(str, NORMAL_RANKS))}"
    return None


class _Group:
    """What the library's buffer asks a group of torch.distributed for."""

    def __init__(self, process_group: Any, group: RankGroup) -> None:
        self._process_group, self._group = process_group, group

    def rank(self) -> int:
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    def _get_backend(self, device: torch.device) -> Any:
        return self._process_group


class AscendBuffer:
    """The library's buffer of one group, with the communicator that it has for itself. Both exchanges may share it."""

    def __init__(self, sdk: Sdk, group: RankGroup, device: torch.device) -> None:
        """The constructor waits for all members of the group. PlatformUnavailable without the library."""
        self.group = replace(group, name=f"{group.name}-exchange")
        self._communicator = join(sdk, self.group, device)
        handle = _Group(self._communicator.process_group, self.group)
        self.buffer = _library(sdk).Buffer(handle, low_latency_mode=True)

    def abort(self) -> None:
        """Leave the group."""
        self._communicator.abort()


class NormalExchange:
    """Implements `srv.platform.expert_exchange.ExpertExchange`."""

    captured = False

    def __init__(self, buffer: AscendBuffer, sizes: ExchangeSizes) -> None:
        self._buffer, self._sizes = buffer.buffer, sizes
        self._local = sizes.local(buffer.group.size)

    @property
    def max_tokens(self) -> int:
        return self._sizes.max_tokens

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        check_tokens(x, self.max_tokens)
        ids = expert_ids.long()
        per_rank, per_node, per_expert, at_rank, _ = self._buffer.get_dispatch_layout(ids, self._sizes.experts)
        rows, _, _, counts, handle, _ = self._buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=at_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights.float(),
        )
        counted = torch.tensor(counts, dtype=torch.int64)
        named = torch.arange(self._local).repeat_interleave(counted).to(x.device)
        return Dispatched(rows, named.unsqueeze(1), _ones(named), counted.to(x.device), handle)

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        combined: Tensor = self._buffer.combine(results.contiguous(), dispatched.handle)[0]
        return combined


class LowLatencyExchange:
    """Implements `srv.platform.expert_exchange.ExpertExchange`. The op takes at least one token: a rank without tokens
    dispatches one that has no expert.
    """

    captured = True

    def __init__(self, buffer: AscendBuffer, sizes: ExchangeSizes) -> None:
        self._buffer, self._sizes = buffer.buffer, sizes
        self._local = sizes.local(buffer.group.size)

    @property
    def max_tokens(self) -> int:
        return self._sizes.max_tokens

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        check_tokens(x, self.max_tokens)
        tokens = len(x)
        x, ids, factors = _at_least_one(x, expert_ids.long(), weights.float())
        rows, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            x.contiguous(), ids, self._sizes.max_tokens, self._sizes.experts, use_fp8=False
        )
        ends = counts.long().cumsum(0)
        places = torch.arange(len(rows), device=x.device)
        named = (places.unsqueeze(1) >= ends).sum(1)  # the experts whose rows come before
        named = torch.where(named < self._local, named, -1)
        return Dispatched(rows, named.unsqueeze(1), _ones(named), counts.long(), (tokens, ids, factors, handle))

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        tokens, ids, factors, handle = dispatched.handle
        combined: Tensor = self._buffer.low_latency_combine(results.contiguous(), ids, factors, handle)[0]
        return combined[:tokens]


class FusedInt8Experts:
    """Implements `srv.platform.expert_exchange.FusedExperts` through fused_deep_moe, which A2 does not have.

    gate_up: int8 [local experts, 2 I, H]; down: int8 [local experts, H, I]; float32 scales of outputs. The activation
    is silu. The op takes at least one token.
    """

    captured = True

    def __init__(
        self,
        buffer: AscendBuffer,
        sdk: Sdk,
        sizes: ExchangeSizes,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
    ) -> None:
        self._buffer, self._sizes = buffer.buffer, sizes
        first = _in_turn(gate_up.transpose(1, 2)).contiguous()
        self._weights = (
            sdk.npu_format_cast(first, _FRACTAL_NZ),
            _in_turn(gate_up_scale.float()).contiguous(),
            sdk.npu_format_cast(down.contiguous(), _FRACTAL_NZ),
            down_scale.float().contiguous(),
        )

    @property
    def max_tokens(self) -> int:
        return self._sizes.max_tokens

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        check_tokens(x, self.max_tokens)
        tokens = len(x)
        x, ids, factors = _at_least_one(x, expert_ids.long(), weights.float())
        out: Tensor = self._buffer.fused_deep_moe(
            x.contiguous(), ids, factors, *self._weights, self._sizes.max_tokens, self._sizes.experts
        )[0]
        return out[:tokens]


def why_not_fused(sizes: ExchangeSizes, inner: int, ranks: int, variant: str) -> str | None:
    """None, or a clause that says why fused_deep_moe cannot compute int8 experts of `inner` columns."""
    if variant != "a3":
        return f"it needs an A3 or newer, not {variant}"
    if sizes.max_tokens > FUSED_TOKENS:
        return f"it takes at most {FUSED_TOKENS} tokens per rank and call, not {sizes.max_tokens}"
    if sizes.experts > _EXPERTS or sizes.experts % ranks:
        return f"{sizes.experts} experts are more than {_EXPERTS}, or cannot be divided among {ranks} ranks"
    if sizes.top_k > _FUSED_TOP_K:
        return f"{sizes.top_k} experts per token are more than {_FUSED_TOP_K}"
    if not _FUSED_HIDDEN <= sizes.hidden <= _HIDDEN or sizes.hidden % _HIDDEN_MULTIPLE:
        return f"rows of {sizes.hidden} elements are not {_FUSED_HIDDEN} to {_HIDDEN} long, in {_HIDDEN_MULTIPLE}s"
    low, high = _FUSED_WIDTHS
    if not low <= 2 * inner <= high or inner % _CHUNK:
        return f"gate and up of {2 * inner} columns are not {low} to {high}, each in chunks of {_CHUNK}"
    return None


def _in_turn(columns: Tensor) -> Tensor:
    """[..., 2 I]: chunks of 64 columns of gate and up in turn, in place of one after the other."""
    chunks = columns.shape[-1] // (2 * _CHUNK)
    return columns.reshape(*columns.shape[:-1], 2, chunks, _CHUNK).transpose(-3, -2).reshape(columns.shape)


def _at_least_one(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, or one that has no expert."""
    if len(x):
        return x, ids, weights
    return x.new_zeros(1, x.shape[1]), ids.new_full((1, ids.shape[1]), -1), weights.new_zeros(1, ids.shape[1])


def _ones(ids: Tensor) -> Tensor:
    return torch.ones(len(ids), 1, dtype=torch.float32, device=ids.device)


def _library(sdk: Sdk) -> Any:
    """The module deep_ep, or the simulator's stand-in for it."""
    simulated = getattr(sdk, DEEP_EP, None)
    if simulated is not None:
        return simulated
    if not is_installed(DEEP_EP):
        raise PlatformUnavailable(
            NAME,
            f"{DEEP_EP} is not installed, which --moe-a2a-backend deepep needs",
            "Build and install it from sgl-kernel-npu, for the installed CANN",
            "deep_ep_missing",
        )
    return importlib.import_module(DEEP_EP)

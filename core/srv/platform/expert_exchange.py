"""Experts that are distributed among ranks: rows go to the ranks of their experts, and results come back.

    x [T, H] ──dispatch──> rows [R, H], ids [R, K'], weights [R, K'] ──experts──> [R, H] ──combine──> [T, H]

Owns the protocol that a vendor's library is adapted to, how a step that exceeds a library's limit is divided, and the
reference, which needs a communicator with the capability "all_to_all" only. It must not know how experts are computed:
they are called as the op contract `experts` says, with ids that begin with the first expert of this rank.

The reference sends a row for each expert of a token, and adds the results where the token is, in the order of its
experts. So the order of a sum depends neither on the number of ranks nor on where experts are; but for the result of
each expert, which is rounded to the dtype of x on its way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from srv.dist.group import RankGroup
from srv.platform.interface import Communicator

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R, H], ids int64 [R, K'], weights float32 [R, K']) -> [R, H]: the experts of this rank, as op `experts`."""


@dataclass(frozen=True, slots=True)
class ExchangeSizes:
    """Of a mixture: all `experts`, of which each rank of the group holds equally many, the ranks in their order;
    `top_k` of them per token; rows of `hidden` elements. `max_tokens`: the most that a rank dispatches in one call.

    The same on all ranks.
    """

    experts: int
    top_k: int
    hidden: int
    max_tokens: int

    def local(self, ranks: int) -> int:
        """How many experts a rank holds. ValueError if they cannot be divided."""
        if self.experts % ranks:
            raise ValueError(f"{self.experts} experts cannot be divided among {ranks} ranks")
        return self.experts // ranks


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What a rank's experts compute: `rows` [R, H], with the `ids` int64 [R, K'] of local experts and their `weights`
    float32 [R, K'], as the op `experts` takes them.

    An id of -1 is none: the row is padding, or another rank has that expert. counts: int64 [local experts], how many
    ids name each, on the device. handle: what `combine` of the same exchange needs.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor
    handle: Any


class ExpertExchange(Protocol):
    """One group's exchange of rows with experts. All members call both methods in turn, layer after layer, also those
    without tokens.

    max_tokens: the most tokens that a call takes. captured: whether calls may be captured; they then have fixed sizes,
    and the host does not wait. Otherwise the host waits for counts.
    """

    @property
    def max_tokens(self) -> int: ...

    @property
    def captured(self) -> bool: ...

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        """x: [T, H]; expert_ids: int32 or int64 [T, K], -1 for none; weights: float32 [T, K].

        ValueError for more than `max_tokens` tokens: nothing is ever dropped.
        """

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """[T, H] in the order of the tokens: the sum over a token's experts, added in float32 and rounded once; 0 for
        a token without experts. results: [R, H], what the experts make of `dispatched.rows`.
        """


class FusedExperts(Protocol):
    """Dispatch, the experts of this rank and combine in one operation, made with the weights of one layer.

    All members call it, layer after layer, also those without tokens. Calls may be captured.
    """

    @property
    def max_tokens(self) -> int: ...

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """[T, H], from what `ExpertExchange.dispatch` takes. ValueError for more than `max_tokens` tokens."""


def through_experts(
    exchange: ExpertExchange, x: Tensor, expert_ids: Tensor, weights: Tensor, compute: Compute, most_tokens: int
) -> Tensor:
    """[T, H]: what the experts of all ranks make of x, in as many rounds as the exchange needs.

    most_tokens: the most that any rank of the group has, which all of them know: it gives the number of rounds. A rank
    with fewer tokens takes part with none.
    """
    limit = exchange.max_tokens
    if len(x) > most_tokens:
        raise ValueError(f"this rank dispatches {len(x)} tokens, and the ranks have agreed on at most {most_tokens}")
    rounds = [slice(begin, begin + limit) for begin in range(0, max(most_tokens, 1), limit)]
    results = []
    for part in rounds:
        dispatched = exchange.dispatch(x[part], expert_ids[part], weights[part])
        results.append(exchange.combine(compute(dispatched.rows, dispatched.ids, dispatched.weights), dispatched))
    return results[0] if len(results) == 1 else torch.cat(results)


class ExactExchange:
    """Implements `ExpertExchange` over a communicator: only rows that exist are sent, and the host waits for counts."""

    captured = False

    def __init__(self, communicator: Communicator, group: RankGroup, sizes: ExchangeSizes) -> None:
        self._communicator, self._size = communicator, group.size
        self._sizes, self._local = sizes, sizes.local(group.size)

    @property
    def max_tokens(self) -> int:
        return self._sizes.max_tokens

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        """See `ExpertExchange`. Rows arrive in the order of ranks, of their experts, and of tokens."""
        check_tokens(x, self.max_tokens)
        experts = expert_ids.reshape(-1).long()
        sent = torch.where(experts < 0, self._sizes.experts, experts)  # none: after all experts
        order = sent.argsort(stable=True)
        counts = torch.zeros(self._sizes.experts + 1, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add_(0, sent, torch.ones_like(sent))[:-1].view(self._size, self._local)
        received = self._communicator.all_to_all(counts)  # [from each rank, for each expert]
        send, receive = torch.stack([counts.sum(1), received.sum(1)]).tolist()
        pairs = order[: sum(send)]
        rows = self._communicator.all_to_all_uneven(x.index_select(0, pairs // expert_ids.shape[1]), send, receive)
        ids = (
            torch.arange(self._local, device=x.device)
            .repeat(self._size)
            .repeat_interleave(received.view(-1), output_size=sum(receive))
        )
        handle = (pairs, expert_ids, weights, send, receive)
        return Dispatched(rows, ids.unsqueeze(1), _ones(ids), received.sum(0), handle)

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """See `ExpertExchange`."""
        pairs, expert_ids, weights, send, receive = dispatched.handle
        returned = self._communicator.all_to_all_uneven(results, receive, send)
        of_pairs = returned.new_zeros(expert_ids.numel(), returned.shape[1]).index_copy_(0, pairs, returned)
        return weighted_sum(of_pairs.view(*expert_ids.shape, of_pairs.shape[1]), expert_ids, weights)


class FixedExchange:
    """Implements `ExpertExchange` over a communicator, with sizes that do not depend on what the experts of tokens are:
    a capture repeats it. Each rank has space for all tokens of each other one.
    """

    captured = True

    def __init__(self, communicator: Communicator, group: RankGroup, sizes: ExchangeSizes) -> None:
        self._communicator, self._size = communicator, group.size
        self._sizes, self._local = sizes, sizes.local(group.size)
        self._space = sizes.max_tokens * min(sizes.top_k, self._local)  # rows from one rank to another

    @property
    def max_tokens(self) -> int:
        return self._sizes.max_tokens

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Dispatched:
        """See `ExpertExchange`. Ids of a token must differ: otherwise its rows may not fit, and are not checked."""
        check_tokens(x, self.max_tokens)
        experts, every = expert_ids.reshape(-1).long(), self._size * self._space
        owners = experts.div(self._local, rounding_mode="floor").clamp(min=0)
        at_owner = (owners.unsqueeze(1) == torch.arange(self._size, device=x.device)) & (experts >= 0).unsqueeze(1)
        places = at_owner.long().cumsum(0).sub(1).gather(1, owners.unsqueeze(1)).squeeze(1)
        slots = torch.where(experts < 0, every, owners * self._space + places)  # one behind all is never sent
        pairs = x.unsqueeze(1).expand(*expert_ids.shape, x.shape[1]).reshape(-1, x.shape[1])
        rows = x.new_zeros(every + 1, x.shape[1]).index_copy_(0, slots, pairs)
        ids = torch.full((every + 1,), -1, dtype=torch.int64, device=x.device)
        ids.index_copy_(0, slots, experts.remainder(self._local))
        received = self._communicator.all_to_all(rows[:-1])
        local = self._communicator.all_to_all(ids[:-1])
        counts = (local.unsqueeze(1) == torch.arange(self._local, device=x.device)).sum(0)
        return Dispatched(received, local.unsqueeze(1), _ones(local), counts, (slots, expert_ids, weights))

    def combine(self, results: Tensor, dispatched: Dispatched) -> Tensor:
        """See `ExpertExchange`."""
        slots, expert_ids, weights = dispatched.handle
        returned = self._communicator.all_to_all(results)
        of_pairs = torch.cat([returned, returned.new_zeros(1, returned.shape[1])]).index_select(0, slots)
        return weighted_sum(of_pairs.view(*expert_ids.shape, of_pairs.shape[1]), expert_ids, weights)


def check_tokens(x: Tensor, most: int) -> None:
    """ValueError if x has more rows than an exchange takes."""
    if len(x) > most:
        raise ValueError(
            f"a rank dispatches at most {most} tokens to experts in one call, and has {len(x)}: divide them, as "
            "through_experts does, or capture fewer rows"
        )


def weighted_sum(results: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """results [T, K, H] times weights [T, K], added over K in its order in float32: [T, H] in the dtype of results."""
    factors = weights.float().masked_fill(expert_ids < 0, 0.0)
    total = torch.zeros(len(results), results.shape[2], dtype=torch.float32, device=results.device)
    for index in range(results.shape[1]):
        total += results[:, index].float() * factors[:, index, None]
    return total.to(results.dtype)


def _ones(ids: Tensor) -> Tensor:
    return torch.ones(len(ids), 1, dtype=torch.float32, device=ids.device)

"""How the memory of the KV pools is divided among a model's cache groups: pages of each, from bytes.

Groups of full attention have equal numbers of pages. A group with a sliding window has as many as all running requests
can hold at a time, and some for the ends of cached prefixes; or the share that `swa_full_tokens_ratio` says. It never
has more than the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import assert_never

from srv.args.config import Config
from srv.args.statement import amount_text
from srv.dist.mesh import mesh_of
from srv.dtypes import FLOAT8
from srv.memory.groups import PageGroup, most_unconfirmed, window_pages
from srv.models.facts.sharding import rank_facts
from srv.planning.steps import draft_count, step_depth
from srv.specs import (
    FullAttention,
    KVLayout,
    Latent,
    ModelFacts,
    PagedSpec,
    Recurrent,
    SlidingWindow,
    single_pool,
)

Lines = list[tuple[str, str]]  # (quantity, explanation)

# For cached prefixes, a window's group has one page for this many of full attention: enough for the last windows of all
# prefixes, if these are that many windows long on average.
PREFIX_PAGES = 8


def cache_specs(config: Config, model: ModelFacts) -> tuple[PagedSpec, ...]:
    """The cache groups of one rank that have pages; `srv.planning.states` has the others, whose states have slots."""
    groups = rank_facts(model, mesh_of(config.get).width("heads")).cache_groups
    if config.memory.disable_hybrid_swa_memory:
        groups = single_pool(groups)
    return tuple(spec for spec in groups if not isinstance(spec, Recurrent))


def page_group(spec: PagedSpec, pages: int, page_size: int) -> PageGroup:
    """What the cache knows of a group of this spec: latent attention needs the pages that full attention needs."""
    return PageGroup(pages, page_size, spec.window)


def kv_dtype(config: Config) -> str:
    """The torch dtype name of the KV pool; "auto" is that of the activations."""
    chosen: str = config.platform.kv_cache_dtype
    return config.model.dtype if chosen == "auto" else FLOAT8.get(chosen, chosen)


def bytes_per_page(config: Config, model: ModelFacts) -> list[int]:
    """Bytes of one page of one rank in each cache group."""
    dtype = kv_dtype(config)
    return [KVLayout(spec, config.memory.page_size, dtype).bytes_per_page() for spec in cache_specs(config, model)]


def most_unconfirmed_tokens(config: Config, model: ModelFacts) -> int:
    """The most tokens of one request whose steps are in flight."""
    context = config.model.context_length or model.context_length
    return most_unconfirmed(step_depth(config), config.schedule.chunked_prefill_size, draft_count(config), context)


def divide_pool(config: Config, model: ModelFacts, pool: int) -> tuple[tuple[PageGroup, ...], Lines]:
    """The pages of each cache group in a pool of `pool` bytes, and how they were computed.

    Each group has one page more, page 0. If there is no room, the number of pages is 0 or less.
    """
    if not model.has_pool:
        return _without_pool(config, model)
    specs, sizes = cache_specs(config, model), bytes_per_page(config, model)
    division = _Division(config, model, specs)
    lines: Lines = [
        (
            _name("page", number),
            f"{_bytes(size)} hold {config.memory.page_size} tokens of {_layers(spec)} in {kv_dtype(config)}",
        )
        for number, (spec, size) in enumerate(zip(specs, sizes, strict=True))
    ]

    def cost(pages: int) -> int:
        return sum((count + 1) * size for count, size in zip(division.at(pages), sizes, strict=True))

    most = max(pool, 0) // min(sizes)
    pages = bisect_right(range(most + 1), pool, key=cost) - 1
    lines.append(
        ("memory_pages", f"{max(pages, 0)} pages of that size fit into the {_bytes(max(pool, 0))} left for the KV pool")
    )
    limit = config.memory.max_total_tokens
    if limit is not None:
        pages = min(pages, limit // config.memory.page_size)
        lines.append(("limit", f"max_total_tokens {limit} allows {limit // config.memory.page_size} pages"))
    counts = division.at(max(pages, 0))
    groups = [page_group(spec, count, config.memory.page_size) for count, spec in zip(counts, specs, strict=True)]
    return tuple(groups), lines


def _without_pool(config: Config, model: ModelFacts) -> tuple[tuple[PageGroup, ...], Lines]:
    """One page without bytes for each running request: it covers the whole context."""
    context = config.model.context_length or model.context_length
    requests = config.schedule.max_running_requests
    line = f"no KV pool: all layers attend within one step, and {requests} requests may run at a time"
    return (PageGroup(requests, context),), [("page", line)]


def group_lines(config: Config, model: ModelFacts, groups: Sequence[PageGroup]) -> Lines:
    """What the pages of each group hold, and why a group with a window has its number of them."""
    if not model.has_pool:
        return []
    division = _Division(config, model, cache_specs(config, model))
    lines: Lines = []
    for number, (group, size) in enumerate(zip(groups, bytes_per_page(config, model), strict=True)):
        pages = f"{group.pages} pages, {group.pages * group.page_size} tokens, {_bytes((group.pages + 1) * size)}"
        lines.append((_name("pages", number), pages if number == 0 else f"{pages}: {division.reason(number)}"))
    return lines


class _Division:
    """The pages of each group, as a function of those of full attention."""

    def __init__(self, config: Config, model: ModelFacts, specs: Sequence[PagedSpec]) -> None:
        self._specs = specs
        self._ratio = config.memory.swa_full_tokens_ratio
        self._requests = config.schedule.max_running_requests
        self._prefixes = not config.memory.disable_radix_cache
        self._page_size = config.memory.page_size
        self._unconfirmed = most_unconfirmed_tokens(config, model)
        self._decoding = step_depth(config) * (1 + draft_count(config))

    def at(self, pages: int) -> list[int]:
        """The first group has `pages` pages, and so has each other group of full attention."""
        return [
            pages if number == 0 or spec.window is None else min(pages, self._window_pages(spec.window, pages))
            for number, spec in enumerate(self._specs)
        ]

    def _window_pages(self, window: int, pages: int) -> int:
        size = self._page_size
        if self._ratio is not None:
            return max(window_pages(window, size, size, self._unconfirmed), math.ceil(self._ratio * pages))
        running = self._requests * window_pages(window, size, size, self._decoding) - (-self._unconfirmed // size)
        return running + (pages // PREFIX_PAGES if self._prefixes else 0)

    def reason(self, number: int) -> str:
        """Why a group after the first one has its number of pages."""
        window = self._specs[number].window
        if window is None:
            return "as many as the first group"
        if self._ratio is not None:
            return f"for the last {window} tokens of requests, swa_full_tokens_ratio {self._ratio}"
        cached = " and of cached prefixes" if self._prefixes else ""
        return f"for the last {window} tokens of {self._requests} running requests{cached}"


def _name(quantity: str, number: int) -> str:
    return quantity if number == 0 else f"{quantity}_{number}"


def _layers(spec: PagedSpec) -> str:
    layers = f"{len(spec.layers)} layers"
    match spec:
        case FullAttention():
            return layers
        case SlidingWindow():
            return f"{layers} with a window of {spec.window} tokens"
        case Latent():
            return f"{layers} of latent attention"
        case _ as never:
            assert_never(never)


def _bytes(amount: int) -> str:
    return amount_text(amount, "bytes")

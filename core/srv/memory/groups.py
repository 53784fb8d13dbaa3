"""What the cache knows of a cache group: how many pages it has, and which of them a request still needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The pages of one cache group.

    pages: usable pages, without page 0. page_size: tokens in one page. window: None if a token needs the pages of all
    tokens before it; otherwise it needs itself and the `window - 1` tokens before it, and pages behind that are freed.
    """

    pages: int
    page_size: int
    window: int | None = None

    def pages_for(self, tokens: int) -> int:
        """Pages that the first `tokens` positions take."""
        return -(-tokens // self.page_size)

    def first_needed_page(self, position: int) -> int:
        """The first page that a token at `position`, or after it, still needs."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_size

    def most_pages(self, unit: int, unconfirmed: int) -> int | None:
        """The most pages that a request of any length holds at a time; None: it needs those of all its tokens.

        unit, unconfirmed: see `window_pages`.
        """
        return None if self.window is None else window_pages(self.window, self.page_size, unit, unconfirmed)


def window_pages(window: int, page_size: int, unit: int, unconfirmed: int) -> int:
    """The most pages that one request holds in a group with a window.

    Pages are kept from the window before the last whole unit of confirmed tokens on, so that the request can be
    continued from there when it has ended. unconfirmed: the most tokens of the steps in flight.
    """
    return -(-(window - 1 + unit - 1 + unconfirmed) // page_size) + 1


def max_tokens(groups: Sequence[PageGroup], unconfirmed: int) -> int | None:
    """Maximum positions of a single request; None if it never holds more than its windows, whatever its length.

    unconfirmed: as in `window_pages`.
    """
    unit = shared_unit(groups)
    most = [group.most_pages(unit, unconfirmed) for group in groups]
    limits = [
        group.pages * group.page_size
        for group, pages in zip(groups, most, strict=True)
        if pages is None or pages > group.pages
    ]
    return min(limits, default=None)


def most_unconfirmed(depth: int, chunk: int, drafts: int, context_length: int) -> int:
    """The most tokens of one request whose steps are in flight: `depth` rows.

    chunk: maximum prompt tokens of a row; -1: a row may have a whole prompt. drafts: maximum drafts of a row.
    """
    return depth * max(chunk if chunk > 0 else context_length, 1 + drafts)


def shared_unit(groups: Sequence[PageGroup]) -> int:
    """Tokens in the unit in which prefixes are shared: whole pages of every group."""
    return math.lcm(*(group.page_size for group in groups))

"""Pages of a list, as OpenAI's endpoints return them. Must not know what is listed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from starlette.datastructures import QueryParams

from srv.errors import RequestError
from srv.server.request.fields import shorten


class Listed(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Listed)


def page(
    items: Sequence[T], query: QueryParams, show: Callable[[T], dict[str, object]], default: int, maximum: int
) -> dict[str, object]:
    """At most `limit` of the items after the one with the id `after`. Raises RequestError."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= maximum):
        raise RequestError(
            f"limit = {shorten(limit)} is refused: it must be an integer from 1 to {maximum}",
            code="invalid_value",
            param="limit",
        )
    ids = [item.id for item in items]
    after = query.get("after")
    if after is not None and after not in ids:
        raise RequestError(f"after = {shorten(after)} is not in the list", code="invalid_value", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    data = [show(item) for item in items[begin : begin + int(limit)]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + len(data) < len(items),
    }

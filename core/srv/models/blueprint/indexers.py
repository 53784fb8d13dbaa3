"""Which layers of a model with sparse attention have an indexer, and which read the choice of an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_PATTERN = {"F": "full", "S": "shared"}


def indexer_types(get: Callable[[str], Any], layers: int) -> list[str]:
    """Of each layer, "full" or "shared", as the configuration of GLM-5 in transformers has them.

    `get(name)`: the value of a field, None if it is left out. `indexer_types` or `index_topk_pattern` ("FSSF") says it
    layer by layer; otherwise one layer in `index_topk_freq` has an indexer from layer `index_skip_topk_offset` - 1 on,
    and each layer before that one.
    """
    stated: Sequence[str] | None = get("indexer_types") or get("index_topk_pattern")
    if stated:
        return [_PATTERN.get(kind, kind) for kind in stated]
    every, offset = get("index_topk_freq"), get("index_skip_topk_offset")
    every, offset = max(1 if every is None else every, 1), 2 if offset is None else offset
    return ["shared" if max(index - offset + 1, 0) % every else "full" for index in range(layers)]


def hy_v4_types(get: Callable[[str], Any], layers: int) -> list[str]:
    """Of each layer of HY-V4: by `indexer_types`, or "full" for the first one, the second, and every fourth then."""
    stated: Sequence[str] | None = get("indexer_types")
    if stated is not None:
        return list(stated)
    return ["full" if index == 0 or index % 4 == 1 else "shared" for index in range(layers)]

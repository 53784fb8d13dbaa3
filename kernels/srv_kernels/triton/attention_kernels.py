"""The kernels of paged attention; `attention` launches them and documents their tensors.

A program attends for one tile: the queries of one row (up to the tile's size) with all query heads of one KV head, so
that a key that was read serves all of them. Row `m` of a tile is query `m // GROUP`, head `m % GROUP`. Scores are in
units of log2, so that the softmax is a power of two; sums are float32.

    keys of a row      0 ....... low ............................ high
                                 |  masked  |  every query sees it  |  masked (causal)
    tiles of extend              a          b                       c
    decode             every block is masked; the blocks from low to high are divided among the splits

A key outside [low, high), or in page 0, is not read: what is there, NaN included, has no effect.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from srv_kernels.triton.attention_reduce import divide, first_visible
from srv_kernels.triton.numerics import convert_stored, dot, round_to, store


@triton.jit
def _load(pointers, exists, in_dim, MASKED: tl.constexpr, PADDED: tl.constexpr):
    if MASKED and PADDED:
        return tl.load(pointers, mask=exists & in_dim, other=0.0)
    if MASKED:
        return tl.load(pointers, mask=exists, other=0.0)
    if PADDED:
        return tl.load(pointers, mask=in_dim, other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend(
    acc,  # [rows of the tile, BLOCK_VALUE] float32: sum of weights times values
    largest,  # [rows of the tile] float32: the largest score so far
    total,  # [rows of the tile] float32: sum of weights
    query,
    positions,
    begin,
    end,
    low,
    high,
    pool,  # pointers of keys, values, key scales and value scales, at this KV head
    strides,  # of pages and tokens of each of these
    table,  # the page table of this row
    scale,
    cap,
    temperature,  # by which scores are multiplied, float32 [rows of the tile]
    window,
    chunk,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The softmax over the blocks of keys that start in [begin, end), continued (Milakov, arXiv:1805.02867)."""
    keys, values, key_scales, value_scales = pool
    key_page, key_token, value_page, value_token, ks_page, ks_token, vs_page, vs_token = strides
    dtype: tl.constexpr = query.dtype
    block_key: tl.constexpr = query.shape[1]
    key_dims = tl.arange(0, block_key)
    value_dims = tl.arange(0, BLOCK_VALUE)
    for start in range(begin, end, BLOCK_KEYS):
        tokens = start + tl.arange(0, BLOCK_KEYS)
        exists = (tokens >= low) & (tokens < high)
        if MASKED:
            pages = tl.load(table + tokens // PAGE_SIZE, mask=exists, other=0)
            exists = exists & (pages != 0)
        else:
            pages = tl.load(table + tokens // PAGE_SIZE)
        pages = pages.to(tl.int64)
        slots = tokens % PAGE_SIZE

        where = keys + (pages * key_page + slots * key_token)[None, :] + key_dims[:, None]
        key = _load(where, exists[None, :], key_dims[:, None] < KEY_DIM, MASKED, block_key != KEY_DIM)
        zeros = tl.zeros((query.shape[0], BLOCK_KEYS), tl.float32)
        scores = dot(query, convert_stored(key, dtype), zeros)
        if KEY_SCALES == 2:
            scores *= _load(key_scales + pages * ks_page + slots * ks_token, exists, exists, MASKED, False)[None, :]
        if HAS_CAP:  # tanh(x) = 1 - 2 / (exp(2x) + 1), with 2 log2(e) in `scale`
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
        else:
            scores *= scale
        if HAS_TEMPERATURE:
            scores *= temperature[:, None]
        if MASKED:
            distance = positions[:, None] - tokens[None, :]
            visible = exists[None, :] & (distance >= 0)
            if HAS_WINDOW:
                visible = visible & (distance < window)
            if HAS_CHUNK:
                visible = visible & (tokens[None, :] >= (positions // chunk * chunk)[:, None])
            scores = tl.where(visible, scores, float("-inf"))

        new = tl.maximum(largest, tl.max(scores, 1))
        # While a query has seen no key, `new` is -inf, and -inf - -inf would be NaN.
        finite = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        largest = new

        if VALUE_SCALES == 2:
            weights *= _load(value_scales + pages * vs_page + slots * vs_token, exists, exists, MASKED, False)[None, :]
        where = values + (pages * value_page + slots * value_token)[:, None] + value_dims[None, :]
        value = _load(where, exists[:, None], value_dims[None, :] < VALUE_DIM, MASKED, BLOCK_VALUE != VALUE_DIM)
        acc = dot(round_to(weights, dtype), convert_stored(value, dtype), acc * shrink[:, None])
    return acc, largest, total


@triton.jit
def _begin(sinks, head, inside, split, HAS_SINKS: tl.constexpr):
    """The largest score and the sum of weights before any key: of the sinks, which count in the first split alone."""
    largest = tl.full(head.shape, float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=inside, other=0.0) * 1.4426950408889634  # log2(e)
        largest = tl.where(split == 0, sink, largest)
    return largest, tl.where(largest == float("-inf"), 0.0, 1.0)


@triton.jit
def _temperature(positions, temperature_from, HAS_TEMPERATURE: tl.constexpr):
    """By what the scores of queries at these positions are multiplied: log(p) / log(n) beyond n."""
    factors = positions
    if HAS_TEMPERATURE:
        beyond = tl.maximum(positions, temperature_from).to(tl.float32)
        factors = tl.log2(beyond) / tl.log2(temperature_from.to(tl.float32))
    return factors


@triton.jit
def _finish(acc, total, value_scales, VALUE_SCALES: tl.constexpr):
    """Weighted means of the values; 0 for a query that sees no key."""
    factor = 1.0 / tl.where(total == 0.0, 1.0, total)
    if VALUE_SCALES == 1:
        factor *= tl.load(value_scales)
    return acc * factor[:, None]


@triton.jit(
    do_not_specialize=["rows", "min_queries", "temperature_from", "window", "chunk", "table_row"],
    do_not_specialize_on_alignment=["lengths"],
)
def extend_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    page_table,
    starts,
    lengths,
    out,
    rows,
    min_queries,
    scale,
    cap,
    temperature_from,
    window,
    chunk,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    key_page,
    key_token,
    key_head,
    value_page,
    value_token,
    value_head,
    ks_page,
    ks_token,
    ks_head,
    vs_page,
    vs_token,
    vs_head,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid: (tokens // (BLOCK_ROWS // GROUP) + rows, KV heads). The last tiles of a row, the longest, start first."""
    tile_queries: tl.constexpr = BLOCK_ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    # Row r has the tiles from starts[r] // tile_queries + r on, which are enough for it and perhaps one too many.
    offset = tl.load(starts) // tile_queries
    row = 0
    above = rows
    while above - row > 1:
        middle = (row + above) // 2
        if tl.load(starts + middle) // tile_queries + middle - offset <= tile:
            row = middle
        else:
            above = middle
    begin = tl.load(starts + row)
    queries = tl.load(starts + row + 1) - begin
    first = (tile - (begin // tile_queries + row - offset)) * tile_queries
    if first >= queries or queries < min_queries:
        return
    length = tl.load(lengths + row)

    m = tl.arange(0, BLOCK_ROWS)
    index = first + m // GROUP
    inside = (index < queries) & (m < tile_queries * GROUP)
    head = kv_head * GROUP + m % GROUP
    token = (begin + index).to(tl.int64)
    key_dims = tl.arange(0, BLOCK_KEY)
    where = q + (token * q_token + head * q_head)[:, None] + key_dims[None, :]
    query = tl.load(where, mask=inside[:, None] & (key_dims[None, :] < KEY_DIM), other=0.0)

    lowest = length - queries + first
    highest = length - queries + tl.minimum(first + tile_queries, queries) - 1
    positions = tl.where(inside, length - queries + index, -1)
    low = first_visible(lowest, window, chunk, HAS_WINDOW, HAS_CHUNK)
    whole = tl.cdiv(first_visible(highest, window, chunk, HAS_WINDOW, HAS_CHUNK), BLOCK_KEYS) * BLOCK_KEYS
    high = highest + 1
    a = low // BLOCK_KEYS * BLOCK_KEYS
    b = tl.maximum(a, whole)
    c = tl.maximum(b, (lowest + 1) // BLOCK_KEYS * BLOCK_KEYS)
    pool = (
        keys + kv_head * key_head,
        values + kv_head * value_head,
        key_scales + kv_head * ks_head,
        value_scales + kv_head * vs_head,
    )
    strides = (key_page, key_token, value_page, value_token, ks_page, ks_token, vs_page, vs_token)
    table = page_table + row.to(tl.int64) * table_row
    if KEY_SCALES == 1:
        scale *= tl.load(key_scales)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
    largest, total = _begin(sinks, head, inside, 0, HAS_SINKS)
    temperature = _temperature(positions, temperature_from, HAS_TEMPERATURE)
    if HAS_WINDOW or HAS_CHUNK:
        acc, largest, total = _attend(
            acc, largest, total, query, positions, a, tl.minimum(b, high), low, high,
            pool, strides, table, scale, cap, temperature, window, chunk,
            KEY_DIM, VALUE_DIM, BLOCK_VALUE, PAGE_SIZE, BLOCK_KEYS,
            KEY_SCALES, VALUE_SCALES, HAS_WINDOW, HAS_CHUNK, HAS_CAP, HAS_TEMPERATURE, True,
        )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, query, positions, b, c, low, high,
        pool, strides, table, scale, cap, temperature, window, chunk,
        KEY_DIM, VALUE_DIM, BLOCK_VALUE, PAGE_SIZE, BLOCK_KEYS,
        KEY_SCALES, VALUE_SCALES, HAS_WINDOW, HAS_CHUNK, HAS_CAP, HAS_TEMPERATURE, False,
    )  # fmt: skip
    acc, largest, total = _attend(
        acc, largest, total, query, positions, c, high, low, high,
        pool, strides, table, scale, cap, temperature, window, chunk,
        KEY_DIM, VALUE_DIM, BLOCK_VALUE, PAGE_SIZE, BLOCK_KEYS,
        KEY_SCALES, VALUE_SCALES, HAS_WINDOW, HAS_CHUNK, HAS_CAP, HAS_TEMPERATURE, True,
    )  # fmt: skip
    value_dims = tl.arange(0, BLOCK_VALUE)
    where = out + (token * out_token + head * out_head)[:, None] + value_dims[None, :]
    result = _finish(acc, total, value_scales, VALUE_SCALES)
    store(where, result, mask=inside[:, None] & (value_dims[None, :] < VALUE_DIM))


@triton.jit(
    do_not_specialize=["least_blocks", "max_queries", "temperature_from", "window", "chunk", "table_row"],
    do_not_specialize_on_alignment=["lengths"],
)
def decode_kernel(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    page_table,
    starts,
    lengths,
    out,
    partial,
    logs,
    least_blocks,
    max_queries,
    scale,
    cap,
    temperature_from,
    window,
    chunk,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    key_page,
    key_token,
    key_head,
    value_page,
    value_token,
    value_head,
    ks_page,
    ks_token,
    ks_head,
    vs_page,
    vs_token,
    vs_head,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid: (KV heads * TILES, splits, rows). A row that one split covers is finished here."""
    tile_queries: tl.constexpr = BLOCK_ROWS // GROUP
    kv_head = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * tile_queries
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    row = tl.program_id(2)
    begin = tl.load(starts + row)
    queries = tl.load(starts + row + 1) - begin
    length = tl.load(lengths + row)
    low = first_visible(length - queries, window, chunk, HAS_WINDOW, HAS_CHUNK)
    share, active = divide(length, low, splits, least_blocks, BLOCK_KEYS)
    if first >= queries or queries > max_queries or split >= active:
        return

    m = tl.arange(0, BLOCK_ROWS)
    index = first + m // GROUP
    inside = (index < queries) & (m < tile_queries * GROUP)
    head = kv_head * GROUP + m % GROUP
    token = (begin + index).to(tl.int64)
    key_dims = tl.arange(0, BLOCK_KEY)
    where = q + (token * q_token + head * q_head)[:, None] + key_dims[None, :]
    query = tl.load(where, mask=inside[:, None] & (key_dims[None, :] < KEY_DIM), other=0.0)

    positions = tl.where(inside, length - queries + index, -1)
    start = (low // BLOCK_KEYS + split * share) * BLOCK_KEYS
    end = tl.minimum(start + share * BLOCK_KEYS, length)
    pool = (
        keys + kv_head * key_head,
        values + kv_head * value_head,
        key_scales + kv_head * ks_head,
        value_scales + kv_head * vs_head,
    )
    strides = (key_page, key_token, value_page, value_token, ks_page, ks_token, vs_page, vs_token)
    if KEY_SCALES == 1:
        scale *= tl.load(key_scales)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
    largest, total = _begin(sinks, head, inside, split, HAS_SINKS)
    temperature = _temperature(positions, temperature_from, HAS_TEMPERATURE)
    acc, largest, total = _attend(
        acc, largest, total, query, positions, start, end, low, length,
        pool, strides, page_table + row.to(tl.int64) * table_row, scale, cap, temperature, window, chunk,
        KEY_DIM, VALUE_DIM, BLOCK_VALUE, PAGE_SIZE, BLOCK_KEYS,
        KEY_SCALES, VALUE_SCALES, HAS_WINDOW, HAS_CHUNK, HAS_CAP, HAS_TEMPERATURE, True,
    )  # fmt: skip
    result = _finish(acc, total, value_scales, VALUE_SCALES)
    value_dims = tl.arange(0, BLOCK_VALUE)
    mask = inside[:, None] & (value_dims[None, :] < VALUE_DIM)
    if active == 1:
        store(out + (token * out_token + head * out_head)[:, None] + value_dims[None, :], result, mask=mask)
    else:
        heads = tl.num_programs(0) // TILES * GROUP
        place = ((row.to(tl.int64) * max_queries + index) * heads + head) * splits + split
        store(partial + place[:, None] * VALUE_DIM + value_dims[None, :], result, mask=mask)
        seen = largest + tl.log2(tl.where(total == 0.0, 1.0, total))  # -inf for a query that sees no key here
        store(logs + place, seen, mask=inside)

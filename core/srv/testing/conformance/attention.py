"""L2: every attention backend that fits, compared with float64 on the host, for several page sizes.

Each check adds one feature to those that it depends on: one page, several pages, page boundaries, shared heads, ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from srv.testing.conformance.bench import PAGES, Bench, pages_for, step_groups
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable, Undeclared
from srv.testing.conformance.setups import (
    BOTH,
    DTYPES,
    FURTHER_HEAD_DIMS,
    HEAD_DIMS,
    MAX_HEAD_SIZES,
    AttentionSetup,
    Shape,
    allocate_pool,
    backend_specs,
    declared_dtypes,
    find_setups,
    is_native,
    largest,
    select_setups,
)

WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5}
SOFT_CAP = 3.0  # low, so that it changes the result visibly
CAPPED = {
    "attn_logit_softcapping": SOFT_CAP,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "sliding_window_pattern": 1,  # every layer has full attention
}
BIASED = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": True, "multi_query": False}
LAYERS = 12  # so many that layers which share buffers by their number modulo 11 or less are found
MANY_LAYERS = 66  # the same for numbers modulo 65 or less
LONG_ROW = 300  # tokens; kernels divide the keys of such a row into parts. `Largest.tokens` may be more
# (query heads, KV heads) of which 2 to 8, 12 and 16 query heads share one KV head, as in real models.
SHARED_HEADS = ((4, 2), (9, 3), (8, 2), (10, 2), (12, 2), (14, 2), (4, 1), (8, 1), (12, 1), (16, 1))
MANY_SHARED_HEADS = ((8, 2),)  # of steps with many rows
_AHEAD = 5  # tokens by which a row may be shorter than the host knows
CHUNK = 37  # tokens of a chunk
LONG_WINDOW = 130  # tokens, beyond the keys that kernels read at once
SCALES = (0.4, 1.7)  # of layers, in units of the usual one
_LARGE_SCORE = 110.0  # exp(89) is more than float32 holds, and exp(-104) less


def placement(kit: Kit) -> str:
    """The result has the shape, dtype and device of q."""
    return run_each(select_setups(kit), lambda setup: _forward_once(Bench(kit, setup)))


def inputs(kit: Kit) -> str:
    """`forward` leaves q, k and v as they are."""
    return run_each(select_setups(kit), lambda setup: _forward_once(Bench(kit, setup), unchanged=True))


def _forward_once(bench: Bench, unchanged: bool = False) -> None:
    """One layer of a step of the bench's own backend; `unchanged`: Fault if it changes its arguments."""
    count = 1 if bench.setup.role == "decode" else 2
    metadata = bench.own.plan(bench.batch([(bench.sequence(), count)]))
    operands = [part.to(bench.kit.device, copy=True) for part in bench.inputs(count)]
    before = [part.to("cpu", copy=True) for part in operands]
    q, k, v = operands
    bench.check_result(bench.own.forward(bench.layers[0], q, k, v, metadata), q)
    for name, part, old in zip("qkv", operands, before, strict=True):
        if unchanged and not torch.equal(part.to("cpu"), old):
            raise Fault(f"{bench.setup}: forward changed {name} in place")


def strides(kit: Kit) -> str:
    """q, k and v that are views of one wide tensor: prompts, chunks and output, with and without shared KV heads."""

    def check(setup: AttentionSetup) -> None:
        check_typical(kit, setup, "q, k and v that are views of one tensor", fused=True)

    return run_shared_heads(
        ((4, 4), (4, 2)), lambda heads, kv_heads: select_setups(kit, heads, kv_heads, max_page_sizes=1), check
    )


def single_page(kit: Kit) -> str:
    """Rows that fit in one page: prompts, then output token by token."""

    def check(setup: AttentionSetup) -> None:
        bench = Bench(kit, setup)
        size = setup.layout.page_size
        lengths = sorted({1, min(2, size), max(1, size - 2)})
        rows = [bench.sequence() for _ in lengths]
        bench.step(list(zip(rows, lengths, strict=True)), "prompts within one page")
        short = [row for row in rows if row.length < size]
        if short:
            bench.step([(row, 1) for row in short], "output within one page")

    return run_each(select_setups(kit, max_head_sizes=MAX_HEAD_SIZES), check)


def several_pages(kit: Kit) -> str:
    """Rows of several pages, anywhere in the pool."""

    def check(setup: AttentionSetup) -> None:
        bench, size = Bench(kit, setup), setup.span
        rows = [bench.sequence(), bench.sequence()]
        bench.step([(rows[0], 2 * size + 3), (rows[1], 4 * size + 1)], "prompts over several pages")
        for _ in range(3):
            bench.step([(row, 1) for row in rows], "output over several pages")

    return run_each(select_setups(kit, max_head_sizes=MAX_HEAD_SIZES), check)


def long_rows(kit: Kit) -> str:
    """A row of many hundred tokens, alone and next to a short row."""
    tokens = largest(kit).tokens

    def check(setup: AttentionSetup) -> None:
        bench, row = Bench(kit, setup, pages=pages_for(setup, tokens)), f"a row of {tokens} tokens"
        rows = [bench.sequence(), bench.sequence()]
        bench.step([(rows[0], tokens), (rows[1], 5)], f"a prompt of {tokens} tokens and a short one")
        bench.step([(rows[0], 1)], f"output of {row}")
        bench.step([(row, 1) for row in rows], f"output of {row} and a short one")

    return f"{tokens} tokens: {run_each(select_setups(kit, max_page_sizes=1), check)}"


def page_boundaries(kit: Kit) -> str:
    """Rows that end just before, on and just after the end of a page; in larger pages, of the first page."""

    def check(setup: AttentionSetup, last_page: int) -> None:
        bench, size = Bench(kit, setup), setup.span
        ends = [pages * size for pages in range(1, last_page + 1)]
        lengths = [length for end in ends for length in (end - 1, end, end + 1)]
        rows = [bench.sequence() for _ in lengths]
        bench.step(list(zip(rows, lengths, strict=True)), "prompts that end at a page boundary")
        for _ in range(2):
            bench.step([(row, 1) for row in rows], "output across a page boundary")

    chosen = select_setups(kit, max_head_sizes=MAX_HEAD_SIZES)
    further = [setup for setup in select_setups(kit, max_page_sizes=largest(kit).page_sizes) if setup not in chosen]
    summaries = [
        run_each(chosen, lambda setup: check(setup, 3)),
        run_each(tuple(further), lambda setup: check(setup, 1)),
    ]
    return "; ".join(filter(None, summaries))


def scale(kit: Kit) -> str:
    """Scales other than the usual 1 / sqrt(head_dim), smaller and larger."""

    def check(setup: AttentionSetup) -> None:
        for factor in SCALES:
            scale = factor * setup.shape.head_dim**-0.5
            check_typical(kit, setup, f"a scale of {scale:.3g}, not 1 / sqrt(head_dim)", scale=scale)

    return run_each(select_setups(kit, max_page_sizes=1), check)


def large_scores(kit: Kit) -> str:
    """Scores that are all large, or all far below 0: their exponentials are infinite or 0 in float32."""

    def check(setup: AttentionSetup) -> None:
        common = 2 ** math.ceil(math.log2(_LARGE_SCORE * setup.shape.head_dim**0.5))
        for sign in (1, -1):
            what = f"scores of about {sign * common * setup.shape.head_dim**-0.5:.0f}"
            check_typical(kit, setup, what, common=sign * common)

    return run_each(select_setups(kit, max_page_sizes=1), check)


def gqa(kit: Kit) -> str:
    """KV heads that several query heads share, in numbers that are powers of two and not, or all of them."""
    return run_shared_heads(
        SHARED_HEADS,
        lambda heads, kv_heads: select_setups(kit, heads, kv_heads, max_page_sizes=2 if is_native(kit) else 1),
        lambda setup: check_typical(kit, setup, "shared KV heads"),
    )


def run_shared_heads(
    heads_of: Sequence[tuple[int, int]],
    choose: Callable[[int, int], tuple[AttentionSetup, ...]],
    check: Callable[[AttentionSetup], None],
) -> str:
    """Run a check for the setups of each number of (query heads, KV heads), of which a plugin may refuse some."""
    summaries: list[str] = []
    refusals: list[str] = []
    for heads, kv_heads in heads_of:
        try:
            chosen = choose(heads, kv_heads)
        except NotApplicable as reason:
            refusals.append(f"{heads}/{kv_heads} heads: {reason}")
            continue
        summaries.append(run_each(chosen, check))
    if not summaries:
        raise NotApplicable("; ".join(refusals))
    return "; ".join((*summaries, *refusals))


def mixed(kit: Kit) -> str:
    """Prompts and output tokens in one step, in any order."""

    def check(setup: AttentionSetup) -> None:
        bench, size = Bench(kit, setup), setup.span
        rows = [bench.sequence() for _ in range(5)]
        bench.step([(rows[0], size + 1), (rows[2], 3)], "two prompts")
        bench.step([(rows[0], 1), (rows[1], size + 2), (rows[2], 1), (rows[3], 1), (rows[4], 2)], "prompts and output")
        bench.step([(rows[4], 1), (rows[1], 1), (rows[0], 1)], "other rows in another order")

    summary, count = run_each(select_setups(kit, max_head_sizes=MAX_HEAD_SIZES), check), largest(kit).rows
    run_each(select_setups(kit, max_page_sizes=1), lambda setup: _check_many_rows(kit, setup, count))
    shared = run_shared_heads(
        MANY_SHARED_HEADS,
        lambda heads, kv_heads: select_setups(kit, heads, kv_heads, max_page_sizes=1),
        lambda setup: _check_long_among_many(kit, setup),
    )
    return f"{summary}; {count} rows; one long row among them: {shared}"


def _check_many_rows(kit: Kit, setup: AttentionSetup, count: int) -> None:
    """So many prompts in one step, then output of all, then output of every other row next to new prompts."""
    bench, what = Bench(kit, setup, pages=2 * count * -(-10 // setup.layout.page_size)), f"a step of {count} rows"
    rows = [bench.sequence() for _ in range(count)]
    bench.step([(row, 1 + number % 7) for number, row in enumerate(rows)], f"{what}, all prompts")
    bench.step([(row, 1) for row in rows], f"{what}, all output")
    pairs = [(row, 1) if number % 2 else (bench.sequence(), 1 + number % 7) for number, row in enumerate(rows)]
    bench.step(pairs, f"{what}, prompts and output")


def _check_long_among_many(kit: Kit, setup: AttentionSetup) -> None:
    """A long row among many short ones: a prompt beside prompts, then output of all."""
    tokens, count = largest(kit).tokens // 2, largest(kit).rows
    size = setup.layout.page_size
    bench = Bench(kit, setup, pages=-(-tokens // size) + 2 * count * -(-10 // size))
    rows, what = [bench.sequence() for _ in range(count)], f"a step of {count} rows, one of {tokens} tokens"
    lengths = [tokens if number == count // 2 else 1 + number % 7 for number in range(count)]
    bench.step(list(zip(rows, lengths, strict=True)), what)
    bench.step([(row, 1) for row in rows], what)


def extend(kit: Kit) -> str:
    """A prompt computed in chunks that end anywhere in a page."""

    def check(setup: AttentionSetup) -> None:
        bench, size = Bench(kit, setup), setup.span
        row, other = bench.sequence(), bench.sequence()
        for chunk in (size - 1, 2, size, 1, size + 3):
            bench.step([(row, chunk)], "a chunk of a prompt")
        bench.step([(other, size + 1), (row, 5)], "a chunk together with a new prompt")

    summary = run_each(select_setups(kit, max_head_sizes=MAX_HEAD_SIZES), check)
    run_each(select_setups(kit, max_page_sizes=1), lambda setup: _check_long_prefix(kit, setup))
    return f"{summary}; a chunk of {CHUNK} tokens after {LONG_ROW}"


def _check_long_prefix(kit: Kit, setup: AttentionSetup) -> None:
    bench = Bench(kit, setup, pages=pages_for(setup, LONG_ROW + CHUNK))
    row, other = bench.sequence(), bench.sequence()
    for count in (LONG_ROW, CHUNK, 1):
        bench.step([(row, count), (other, 3)], f"a chunk of {count} tokens of a prompt of {LONG_ROW + CHUNK + 1}")


def sharing(kit: Kit) -> str:
    """Rows that begin with the pages of another row."""

    def check(setup: AttentionSetup) -> None:
        bench, size = Bench(kit, setup), setup.span
        first = bench.sequence()
        bench.step([(first, 2 * size + 2)], "the row whose pages are shared")
        second, third = bench.sequence(first, 2 * size), bench.sequence(first, size)
        bench.step([(second, 3), (third, 1), (first, 1)], "rows over shared pages")
        bench.step([(first, 1), (second, 1), (third, 1)], "output over shared pages")

    return run_each(select_setups(kit, max_head_sizes=MAX_HEAD_SIZES), check)


def same_step(kit: Kit) -> str:
    """Rows over the same pages, each with one of the tokens that the step adds to them."""

    def check(setup: AttentionSetup) -> None:
        bench, size = Bench(kit, setup), setup.span
        row = bench.sequence()
        bench.step([(row, size - 2)], "the tokens before")
        for order in (range(5), (4, 2, 0, 3, 1)):
            bench.step_of_single_tokens(row, order, "rows over pages of the same step")

    return run_each(select_setups(kit, max_head_sizes=MAX_HEAD_SIZES), check)


def device_lengths(kit: Kit) -> str:
    """Rows of which the host knows only how long they are at most, as those with drafts in flight."""
    chosen = [setup for setup in select_setups(kit) if setup.takes_lengths]
    if not chosen:
        raise NotApplicable('no backend declares lengths="device"')

    def check(setup: AttentionSetup) -> None:
        bench, size = Bench(kit, setup, extra_columns=_AHEAD), setup.span
        rows = [bench.sequence() for _ in range(3)]
        bench.step(list(zip(rows, (1, size, 2 * size + 1), strict=True)), "prompts")
        for counts in ((1, 1, 1), (3, 1, 4), (1, 2, 1)):
            what = "rows whose lengths only the device knows"
            bench.step(list(zip(rows, counts, strict=True)), what, ahead=_AHEAD)

    return run_each(tuple(chosen), check)


def layers(kit: Kit) -> str:
    """Each layer has its own keys and values."""

    def check(setup: AttentionSetup) -> None:
        count = MANY_LAYERS if is_native(kit) else LAYERS
        bench = Bench(kit, setup.with_layers(count))
        row = bench.sequence()
        for tokens in (setup.span + 1, 1, 1):
            bench.step([(row, tokens)], f"{count} layers", layers=range(count))

    return run_each(select_setups(kit, max_page_sizes=1), check)


def results(kit: Kit) -> str:
    """A result keeps its values while later layers and steps are computed."""

    def check(setup: AttentionSetup) -> None:
        bench, counts = Bench(kit, setup), {BOTH: (3, 1), "prefill": (3, 3), "decode": (1, 1)}[setup.role]
        row, copies = bench.sequence(), []
        for count in counts:
            metadata = bench.own.plan(bench.batch([(row, count)]))
            for layer in bench.layers:
                q, k, v = (part.to(kit.device) for part in bench.inputs(count))
                result = bench.own.forward(layer, q, k, v, metadata)
                copies.append((result, result.to("cpu", copy=True)))
            row.length += count
        if not all(torch.equal(result.to("cpu"), copy) for result, copy in copies):
            raise Fault(f"{setup}: a result was overwritten by a later layer or step")

    return run_each(select_setups(kit, max_page_sizes=1), check)


def unused_columns(kit: Kit) -> str:
    """A page table wider than every row; the entries after a row's last page are 0."""

    def check(setup: AttentionSetup) -> None:
        bench, size = Bench(kit, setup, extra_columns=5), setup.span
        rows = [bench.sequence(), bench.sequence()]
        bench.step([(rows[0], 1), (rows[1], 2 * size)], "a wide page table")
        bench.step([(row, 1) for row in rows], "a wide page table")

    return run_each(select_setups(kit), check)


def window(kit: Kit) -> str:
    """Layers with a sliding window: prompts, output, and long prompts in chunks shorter and longer than the window."""
    in_chunks = "chunked_prefill" in kit.capabilities or "prefix_cache" in kit.capabilities

    def check(setup: AttentionSetup) -> None:
        for tokens in (1, 5, setup.span + 2):
            check_typical(kit, setup, f"a window of {tokens} tokens", window=tokens)
        for tokens in (5, 40) if in_chunks else ():
            _check_long_prompt(kit, setup, tokens, in_chunks)

    summary = run_each(select_setups(kit, fields=WINDOWED), check)
    longest = select_setups(kit, fields=WINDOWED, max_page_sizes=1)
    run_each(longest, lambda setup: _check_long_prompt(kit, setup, LONG_WINDOW, in_chunks))
    return f"{summary}; windows of up to {LONG_WINDOW} tokens"


def _check_long_prompt(kit: Kit, setup: AttentionSetup, tokens: int, in_chunks: bool) -> None:
    """A prompt of so many blocks of keys that kernels skip those behind the window, next to a short one."""
    chunk = max(CHUNK, tokens // 2)
    counts = (chunk, chunk, chunk + 3, chunk) if in_chunks else (4 * chunk,)
    bench = Bench(kit, setup, window=tokens, pages=pages_for(setup, sum(counts)))
    what = f"a prompt{' in chunks' if in_chunks else ''}, in a window of {tokens} tokens"
    row, other = bench.sequence(), bench.sequence()
    for count in counts[:-1]:
        bench.step([(row, count)], what)
    bench.step([(other, 7), (row, counts[-1])], what)
    bench.step([(row, 1), (other, 1)], what)


def groups(kit: Kit) -> str:
    """Two cache groups, one of them with a sliding window, each with a backend and a pool of its own."""

    def check(setup: AttentionSetup) -> None:
        benches = Bench(kit, setup, window=5), Bench(kit, setup, seed=1)
        rows = [[bench.sequence(), bench.sequence()] for bench in benches]
        what = "two cache groups, one with a window of 5 tokens"
        for bench, row in zip(benches, rows, strict=True):
            bench.step(list(zip(row, (setup.span + 1, 3 * setup.span + 2), strict=True)), what, layers=(0, 1))
        for counts in ((1, 1), (setup.span, 1), (1, 1)):
            steps = [list(zip(row, counts, strict=True)) for row in rows]
            step_groups(list(zip(benches, steps, strict=True)), what)

    return run_each(select_setups(kit, fields=WINDOWED, max_page_sizes=1), check)


def window_pages(kit: Kit) -> str:
    """Pages behind a sliding window that hold NaN, in prompts and in output."""

    def check(setup: AttentionSetup) -> None:
        size = setup.span
        for tokens in (1, 5, size + 2):
            bench = Bench(kit, setup, window=tokens)
            rows = [bench.sequence(), bench.sequence()]
            bench.step([(rows[0], 3 * size + 2), (rows[1], 5)], f"a window of {tokens} tokens")
            spoiled = bench.spoiled_page()
            for count in (1, 1, 3):
                for row in rows:
                    behind = max(0, row.length - tokens + 1) // setup.layout.page_size
                    row.pages[:behind] = [spoiled] * behind
                bench.step([(row, count) for row in rows], f"NaN in pages behind a window of {tokens} tokens")

    return run_each(select_setups(kit, fields=WINDOWED), check)


def soft_cap(kit: Kit) -> str:
    """Layers with capped scores."""

    def check(setup: AttentionSetup) -> None:
        check_typical(kit, setup, "capped scores", soft_cap=SOFT_CAP)
        if "window" in setup.spec.traits:
            check_typical(kit, setup, "capped scores in a window of 5 tokens", window=5, soft_cap=SOFT_CAP)

    return run_each(select_setups(kit, fields=CAPPED), check)


def alibi(kit: Kit) -> str:
    """Layers with linear position biases, which differ between heads."""

    def check(setup: AttentionSetup) -> None:
        check_typical(kit, setup, "linear position biases", alibi=slopes(setup))

    return run_each(select_setups(kit, fields=BIASED), check)


def slopes(setup: AttentionSetup) -> tuple[float, ...]:
    return tuple(2.0 ** -(head + 1) for head in range(setup.shape.heads))


def dtypes(kit: Kit) -> str:
    """Each declared dtype is supported by a backend, and correct in every backend that supports it."""
    summaries: list[str] = []
    for dtype in declared_dtypes(kit):
        try:
            chosen = select_setups(kit, dtypes=(dtype,))
        except NotApplicable as reason:
            raise Fault(
                f"it declares the capability {dtype}, but {reason}",
                f"Remove {dtype} from the capabilities, or support it in a backend.",
            ) from reason
        run_each(chosen, lambda setup: check_typical(kit, setup, f"dtype {setup.dtype}"))
        summaries.append(f"{dtype} in {', '.join(dict.fromkeys(setup.name for setup in chosen))}")
    return "; ".join(summaries)


def int8_kv(kit: Kit) -> str:
    """An int8 KV pool, with and without shared KV heads, in every declared dtype that supports it."""
    summaries: list[str] = []
    for kv_heads in (4, 2):
        refusals: list[str] = []
        for dtype in declared_dtypes(kit):
            try:
                chosen = select_setups(
                    kit, 4, kv_heads, dtypes=(dtype,), max_head_sizes=MAX_HEAD_SIZES, kv_dtype="int8"
                )
            except NotApplicable as reason:
                refusals.append(str(reason))
                continue
            for setup in chosen:
                _check_pool_size(kit, setup)
            summaries.append(run_each(chosen, lambda setup: check_typical(kit, setup, "keys and values of int8")))
        if len(refusals) == len(declared_dtypes(kit)):
            raise Fault(
                f"it declares the capability int8_kv, but {'; '.join(refusals)}",
                "Remove int8_kv from the capabilities, or support it in a backend.",
            )
    return "; ".join(summaries)


def _check_pool_size(kit: Kit, setup: AttentionSetup) -> None:
    """The pool's buffers have the size that the memory budget assumes, including scales."""
    kv = allocate_pool(kit, setup.layout, PAGES)
    size = sum(tensor.nbytes for tensor in kv.all())
    needed = (PAGES + 1) * setup.layout.bytes_per_page()
    if size < needed:
        raise Fault(
            f"{setup}: keys and values of int8 with their scales take {needed} bytes in {PAGES} pages and page 0, but "
            f"the pool's buffers have {size}",
            "Store a float32 scale per token and head with the int8 values; see KVLayout.",
        )


def head_dims(kit: Kit) -> str:
    """Attention is correct for every head size that a backend accepts."""
    dims_by_setup: dict[str, list[str]] = {}
    sizes = (*HEAD_DIMS, *FURTHER_HEAD_DIMS)
    for spec, head_dim, dtype in itertools.product(backend_specs(kit, "attention"), sizes, declared_dtypes(kit)):
        setups, _ = find_setups(kit, spec, Shape(4, 2, head_dim), dtype, max_page_sizes=1)
        for setup in setups:
            check_typical(kit, setup, f"heads of {head_dim}")
            dims_by_setup.setdefault(setup.name, []).append(f"{head_dim} {dtype}")
    if not dims_by_setup:
        raise NotApplicable(f"no backend supports heads of {', '.join(map(str, sizes))}")
    return "; ".join(f"{name}: {', '.join(names)}" for name, names in dims_by_setup.items())


def undeclared(kit: Kit) -> str:
    """Dtypes that work but are not among the capabilities."""
    working: list[str] = []
    for dtype in DTYPES:
        if dtype in declared_dtypes(kit):
            continue
        try:
            run_each(
                select_setups(kit, dtypes=(dtype,)), lambda setup: check_typical(kit, setup, f"dtype {setup.dtype}")
            )
        except Exception:  # noqa: BLE001 - an undeclared dtype may fail in any way
            continue
        working.append(dtype)
    if working:
        raise Undeclared(
            f"attention is correct in {', '.join(working)}, which the plugin does not declare",
            f"Add {', '.join(working)} to the capabilities if the whole platform supports it.",
        )
    return "no undeclared dtype works"


def check_typical(kit: Kit, setup: AttentionSetup, what: str, **traits: Any) -> None:
    """Prompts, one of several pages, then output: what every backend must support. `traits`: see `Bench`."""
    bench, size = Bench(kit, setup, **traits), setup.span
    rows = [bench.sequence(), bench.sequence()]
    bench.step([(rows[0], 3), (rows[1], 2 * size + 1)], what)
    for _ in range(2):
        bench.step([(row, 1) for row in rows], what)


def run_each(chosen: tuple[AttentionSetup, ...], check: Callable[[AttentionSetup], None]) -> str:
    pages: dict[str, list[str]] = {}
    for setup in chosen:
        check(setup)
        configuration = f"{setup.name}, {setup.dtype}, {setup.shape}"
        pages.setdefault(configuration, []).append(str(setup.layout.page_size))
    return "; ".join(f"{configuration}, pages of {' and '.join(sizes)}" for configuration, sizes in pages.items())

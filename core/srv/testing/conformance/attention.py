"""L2: attention backends against float64 on the host, each backend that fits, over pages of several sizes.

Each check adds one thing to those that it builds on: a page, then several, then their borders, then shared heads.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.testing.conformance.bench import PAGES, Bench
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable, Undeclared
from srv.testing.conformance.setups import (
    DTYPES,
    HEAD_DIMS,
    HEAD_SIZES,
    Setup,
    Shape,
    declared_dtypes,
    pool,
    setups,
    some_setups,
)

SOFT_CAP = 3.0  # low, so that it changes much


def placement(kit: Kit) -> str:
    """The result is a tensor like q: its shape, its dtype, on the device."""

    def check(setup: Setup) -> None:
        bench = Bench(kit, setup)
        rows = [(bench.sequence(), 1)]
        metadata = bench.backend.plan(bench.batch(rows))
        bench.forward(bench.layers[0], *bench.inputs(1), metadata)

    return _each(some_setups(kit), check)


def single_page(kit: Kit) -> str:
    """Rows that fit one page: prompts, then output a token at a time."""

    def check(setup: Setup) -> None:
        bench = Bench(kit, setup)
        lengths = sorted({1, 2, max(1, setup.layout.page_size - 2)})
        rows = [bench.sequence() for _ in lengths]
        bench.step(list(zip(rows, lengths, strict=True)), "prompts within one page")
        short = [row for row in rows if row.length < setup.layout.page_size]
        bench.step([(row, 1) for row in short], "output within one page")

    return _each(some_setups(kit, head_sizes=HEAD_SIZES), check)


def several_pages(kit: Kit) -> str:
    """Rows of several pages, which lie anywhere in the pool."""

    def check(setup: Setup) -> None:
        bench, size = Bench(kit, setup), setup.layout.page_size
        rows = [bench.sequence(), bench.sequence()]
        bench.step([(rows[0], 2 * size + 3), (rows[1], 4 * size + 1)], "prompts over several pages")
        for _ in range(3):
            bench.step([(row, 1) for row in rows], "output over several pages")

    return _each(some_setups(kit, head_sizes=HEAD_SIZES), check)


def page_borders(kit: Kit) -> str:
    """Rows that end just before, on and just after the end of a page."""

    def check(setup: Setup) -> None:
        bench, size = Bench(kit, setup), setup.layout.page_size
        lengths = [length for pages in (1, 2, 3) for length in (pages * size - 1, pages * size, pages * size + 1)]
        rows = [bench.sequence() for _ in lengths]
        bench.step(list(zip(rows, lengths, strict=True)), "prompts that end at a border of a page")
        for _ in range(2):
            bench.step([(row, 1) for row in rows], "output across a border of a page")

    return _each(some_setups(kit, head_sizes=HEAD_SIZES), check)


def gqa(kit: Kit) -> str:
    """Query heads that share a KV head, two, four and all of them."""
    seen = [
        _each(some_setups(kit, 4, kv_heads), lambda setup: _typical(kit, setup, "shared KV heads"))
        for kv_heads in (2, 1)
    ]
    seen.append(_each(some_setups(kit, 8, 2), lambda setup: _typical(kit, setup, "shared KV heads")))
    return "; ".join(seen)


def mixed(kit: Kit) -> str:
    """Prompts and output in one step, in any order."""

    def check(setup: Setup) -> None:
        bench, size = Bench(kit, setup), setup.layout.page_size
        rows = [bench.sequence() for _ in range(5)]
        bench.step([(rows[0], size + 1), (rows[2], 3)], "two prompts")
        bench.step([(rows[0], 1), (rows[1], size + 2), (rows[2], 1), (rows[3], 1), (rows[4], 2)], "prompts and output")
        bench.step([(rows[4], 1), (rows[1], 1), (rows[0], 1)], "other rows in another order")

    return _each(some_setups(kit, head_sizes=HEAD_SIZES), check)


def extend(kit: Kit) -> str:
    """A prompt computed in chunks that end anywhere."""

    def check(setup: Setup) -> None:
        bench, size = Bench(kit, setup), setup.layout.page_size
        row, other = bench.sequence(), bench.sequence()
        for chunk in (size - 1, 2, size, 1, size + 3):
            bench.step([(row, chunk)], "a chunk of a prompt")
        bench.step([(other, size + 1), (row, 5)], "a chunk beside a new prompt")

    return _each(some_setups(kit, head_sizes=HEAD_SIZES), check)


def sharing(kit: Kit) -> str:
    """Rows that begin with the pages of another one."""

    def check(setup: Setup) -> None:
        bench, size = Bench(kit, setup), setup.layout.page_size
        first = bench.sequence()
        bench.step([(first, 2 * size + 2)], "the row that is shared")
        second, third = bench.sequence(first, 2 * size), bench.sequence(first, size)
        bench.step([(second, 3), (third, 1), (first, 1)], "rows over shared pages")
        bench.step([(first, 1), (second, 1), (third, 1)], "output over shared pages")

    return _each(some_setups(kit, head_sizes=HEAD_SIZES), check)


def layers(kit: Kit) -> str:
    """Layers keep their keys and values apart."""

    def check(setup: Setup) -> None:
        bench = Bench(kit, setup)
        row = bench.sequence()
        for count in (setup.layout.page_size + 1, 1, 1):
            bench.step([(row, count)], "two layers", layers=(0, 1))

    return _each(some_setups(kit), check)


def unused_columns(kit: Kit) -> str:
    """A page table that is wider than any row needs; what follows a row's last page is 0."""

    def check(setup: Setup) -> None:
        bench, size = Bench(kit, setup, wider_by=5), setup.layout.page_size
        rows = [bench.sequence(), bench.sequence()]
        bench.step([(rows[0], 1), (rows[1], 2 * size)], "a wide page table")
        bench.step([(row, 1) for row in rows], "a wide page table")

    return _each(some_setups(kit), check)


def window(kit: Kit) -> str:
    """Layers that see the last tokens only."""

    def check(setup: Setup) -> None:
        for tokens in (1, 5, setup.layout.page_size + 2):
            _typical(kit, setup, f"a window of {tokens} tokens", window=tokens)

    fields = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5}
    return _each(some_setups(kit, fields=fields), check)


def soft_cap(kit: Kit) -> str:
    """Scores that are capped."""
    fields = {"attn_logit_softcapping": SOFT_CAP, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    return _each(
        some_setups(kit, fields=fields), lambda setup: _typical(kit, setup, "capped scores", soft_cap=SOFT_CAP)
    )


def dtypes(kit: Kit) -> str:
    """Every declared dtype is right, in every backend that takes it; each is taken by one."""
    seen: list[str] = []
    for dtype in declared_dtypes(kit):
        try:
            chosen = some_setups(kit, dtypes=(dtype,))
        except NotApplicable as reason:
            raise Fault(
                f"it declares the capability {dtype}, but {reason}",
                f"Leave {dtype} out of the capabilities, or let a backend take it.",
            ) from reason
        _each(chosen, lambda setup: _typical(kit, setup, f"dtype {setup.dtype}"))
        seen.append(f"{dtype} in {', '.join(dict.fromkeys(setup.spec.name for setup in chosen))}")
    return "; ".join(seen)


def int8_kv(kit: Kit) -> str:
    """A pool of 8-bit integers, with shared and with unshared KV heads, in every declared dtype that takes one."""
    seen: list[str] = []
    for kv_heads in (4, 2):
        refused: list[str] = []
        for dtype in declared_dtypes(kit):
            try:
                chosen = some_setups(kit, 4, kv_heads, dtypes=(dtype,), head_sizes=HEAD_SIZES, kv_dtype="int8")
            except NotApplicable as reason:
                refused.append(str(reason))
                continue
            for setup in chosen:
                _check_room(kit, setup)
            seen.append(_each(chosen, lambda setup: _typical(kit, setup, "keys and values of int8")))
        if len(refused) == len(declared_dtypes(kit)):
            raise Fault(
                f"it declares the capability int8_kv, but {'; '.join(refused)}",
                "Leave int8_kv out of the capabilities, or let a backend take it.",
            )
    return "; ".join(seen)


def _check_room(kit: Kit, setup: Setup) -> None:
    """The pool's buffers take what the memory budget counts for them, scales included."""
    kv = pool(kit, setup.layout, PAGES)
    size = sum(buffer.nbytes for buffer in (*kv.keys, *kv.values))
    wanted = (PAGES + 1) * setup.layout.bytes_per_page()
    if size < wanted:
        raise Fault(
            f"{setup}: keys and values of int8 with their scales take {wanted} bytes in {PAGES} pages and page 0, but "
            f"the pool's buffers have {size}",
            "Give each token's key and value of a head a float32 beside its bytes; see KVLayout.",
        )


def head_dims(kit: Kit) -> str:
    """Every head size that a backend accepts is right."""
    seen: dict[str, list[str]] = {}
    for head_dim in HEAD_DIMS:
        for dtype in declared_dtypes(kit):
            found, _ = setups(kit, Shape(4, 2, head_dim), dtype, most=1)
            for setup in found:
                _typical(kit, setup, f"heads of {head_dim}")
                seen.setdefault(setup.spec.name, []).append(f"{head_dim} {dtype}")
    if not seen:
        raise NotApplicable(f"no backend takes heads of {', '.join(map(str, HEAD_DIMS))}")
    return "; ".join(f"{name}: {', '.join(each)}" for name, each in seen.items())


def undeclared(kit: Kit) -> str:
    """A dtype that works and is not among the capabilities."""
    working: list[str] = []
    for dtype in DTYPES:
        if dtype in declared_dtypes(kit):
            continue
        try:
            _each(some_setups(kit, dtypes=(dtype,)), lambda setup: _typical(kit, setup, f"dtype {setup.dtype}"))
        except Exception:  # noqa: BLE001 - it is not declared, so it may fail in any way
            continue
        working.append(dtype)
    if working:
        raise Undeclared(
            f"attention is right in {', '.join(working)}, which the plugin does not declare",
            f"Add {', '.join(working)} to the capabilities if the whole platform works in it.",
        )
    return "nothing works that is not declared"


def _typical(kit: Kit, setup: Setup, what: str, *, window: int | None = None, soft_cap: float | None = None) -> None:
    """Prompts, one of several pages, then output: what needs no capability but to be served at all."""
    bench, size = Bench(kit, setup, window=window, soft_cap=soft_cap), setup.layout.page_size
    rows = [bench.sequence(), bench.sequence()]
    bench.step([(rows[0], 3), (rows[1], 2 * size + 1)], what)
    for _ in range(2):
        bench.step([(row, 1) for row in rows], what)


def _each(chosen: tuple[Setup, ...], check: Callable[[Setup], None]) -> str:
    pages: dict[str, list[str]] = {}
    for setup in chosen:
        check(setup)
        told = f"{setup.spec.name}, {setup.dtype}, {setup.shape}"
        pages.setdefault(told, []).append(str(setup.layout.page_size))
    return "; ".join(f"{told}, pages of {' and '.join(sizes)}" for told, sizes in pages.items())

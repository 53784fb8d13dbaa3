"""L2: what is declared batch invariant gives a row the same bits alone, with other rows, and in other chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from srv.models.layers.context import BuildContext
from srv.models.layers.linear import Linear
from srv.platform.interface import OpImpl
from srv.platform.ops import Ops
from srv.testing.conformance.attention import run_each
from srv.testing.conformance.bench import PAGES, Bench
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault, NotApplicable
from srv.testing.conformance.ops import contracts, function_of, implementations
from srv.testing.conformance.setups import MAX_HEAD_SIZES, AttentionSetup, declared_dtypes, dtype_of, select_setups

# The arguments of ops with an entry per row; of the others, which have weights, rows are in the first argument alone.
_ROWS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"add_rms_norm": (0, 1), "rotary": (0, 1, 3), "experts": (0, 1, 2), "experts_int8": (0, 1, 2)}
    | dict.fromkeys(("rms_norm", "silu_and_mul", "linear_w8a8", "linear_w8a8_static", "linear_int8"), (0,))
    | dict.fromkeys(("linear_fp8", "linear_gguf"), (0,))
)
_MIN_ROWS = 4
_PRODUCT = (37, 576, 192)  # rows, inputs and outputs of a product with unquantized weights
_LONG, _SHORT, _CHUNKS = 45, 3, (7, 1, 20, 17)  # tokens
PRODUCTS = "batch_invariant"  # the capability


def op_rows(kit: Kit) -> str:
    """Ops that declare it, in every dtype, and products with weights if the capability is declared."""
    summaries = list(_seen_ops(kit))
    if PRODUCTS in kit.capabilities:
        rows, inputs, outputs = _PRODUCT
        generator = torch.Generator().manual_seed(0)
        for name in declared_dtypes(kit):
            x, weight = (torch.randn(size, inputs, generator=generator).to(dtype_of(name)) for size in (rows, outputs))
            _compare(kit, f"a weight product in {name}", _linear(kit, weight), (x,), (0,))
            summaries.append(f"weight products in {name}")
    if not summaries:
        raise NotApplicable("the plugin declares neither an op batch invariant, nor the capability")
    return ", ".join(summaries)


def _linear(kit: Kit, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A layer with the weight, after `post_load`."""
    context = BuildContext(kit.device, weight.dtype, Ops(kit.name, kit.platform.ops, batch_invariant=True))
    layer = Linear(context, {"": len(weight)}, weight.shape[1], bias=False)
    with torch.inference_mode():
        layer.weight.copy_(weight)
        kit.platform.post_load(torch.nn.ModuleList([layer]))
    return layer


def _seen_ops(kit: Kit) -> Iterator[str]:
    for name, rows in _ROWS.items():
        for dtype in contracts()[name].dtypes:
            for impl in implementations(kit, name, dtype):
                if impl.batch_invariant:
                    what = f"{name} ({impl.name}) in {str(dtype).removeprefix('torch.')}"
                    _check_op(kit, impl, dtype, rows, what)
                    yield what


def _check_op(kit: Kit, impl: OpImpl, dtype: torch.dtype, rows: Sequence[int], what: str) -> None:
    for case in contracts()[impl.op].cases(dtype, 0):
        if len(case.args[0]) >= _MIN_ROWS and (not case.needs or case.needs in kit.capabilities):
            _compare(kit, f"{what}, {case.label}", function_of(impl), case.args, rows)


def _compare(kit: Kit, what: str, function: Callable[..., Any], args: Sequence[Any], rows: Sequence[int]) -> None:
    """Call a function for all rows, and for a part of them, such as one."""

    def call(part: slice) -> list[Tensor]:
        part_args = [arg[part] if number in rows else arg for number, arg in enumerate(args)]
        with torch.inference_mode():
            results = function(*(arg.to(kit.device) if isinstance(arg, Tensor) else arg for arg in part_args))
        return [result.to("cpu") for result in (results if isinstance(results, tuple) else (results,))]

    count = len(args[rows[0]])
    whole = call(slice(0, count))
    for part in (slice(0, 1), slice(count - 1, count), slice(1, count // 2 + 1)):
        for expected, actual in zip(whole, call(part), strict=True):
            if not torch.equal(expected[part], actual):
                raise Fault(f"{what}: {part.stop - part.start} of {count} rows get other bits without the others")


def batch_invariant(kit: Kit) -> str:
    """Backends that declare it: a prompt and its output, alone, next to other rows, and in chunks."""
    invariant = [setup for setup in select_setups(kit, max_head_sizes=MAX_HEAD_SIZES) if _declares(setup)]
    if not invariant:
        raise NotApplicable("no attention backend declares batch_invariant")
    return run_each(tuple(invariant), lambda setup: _check_attention(kit, setup))


def _declares(setup: AttentionSetup) -> bool:
    return setup.spec.batch_invariant and setup.partner.batch_invariant


def _check_attention(kit: Kit, setup: AttentionSetup) -> None:
    tokens = min(_LONG, PAGES // 2 * setup.layout.page_size - 1)
    inputs = Bench(kit, setup).inputs(tokens + 1)
    others = Bench(kit, setup, seed=1).inputs(_SHORT)
    alone = _outputs(kit, setup, inputs, others, (tokens,), 0)
    for what, chunks, rows in (("next to other rows", (tokens,), 2), ("in chunks", _CHUNKS, 0)):
        actual = _outputs(kit, setup, inputs, others, chunks, rows)
        if not torch.equal(alone, actual):
            token = int((alone != actual).flatten(1).any(1).int().argmax())
            raise Fault(
                f"{setup}: token {token} of {tokens + 1} gets other bits {what} than alone and in one step",
                "Add up keys in an order that depends on the row alone, or do not declare batch_invariant.",
            )


def _outputs(
    kit: Kit,
    setup: AttentionSetup,
    inputs: Sequence[Tensor],
    others: Sequence[Tensor],
    chunks: Sequence[int],
    count: int,
) -> Tensor:
    """The results of a row's prompt in chunks and of one more token; `count`: other rows of each step, before it."""
    bench = Bench(kit, setup)
    row, results, total = bench.sequence(), [], len(inputs[0]) - 1
    for chunk in (*chunks, total, 1):  # what is left of the prompt comes last
        size = 1 if row.length == total else min(chunk, total - row.length)
        rows = [*((bench.sequence(), len(others[0])) for _ in range(count)), (row, size)]
        positions = slice(row.length, row.length + size)
        step = [torch.cat([*[other] * count, part[positions]]) for part, other in zip(inputs, others, strict=True)]
        q, k, v = step
        results.append(bench.forward(bench.layers[0], q, k, v, bench.backend.plan(bench.batch(rows)))[-size:])
        row.length += size
        if row.length > total:
            break
    return torch.cat(results)

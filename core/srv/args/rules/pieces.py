"""Rules for piecewise graphs: for which token counts the layers are captured, and the memory for it. Torch-free."""

from __future__ import annotations

import json

from srv.args.rules.reserve import RESERVED_MEMORY, activation_bytes_per_token
from srv.dtypes import item_size
from srv.platform.facts import Constraint, Contribution, ResolutionContext

_SMALLEST = 8
_BYTES_PER_PIECE = 64 << 10  # what a device keeps of a captured piece of some ten kernels


def captured_tokens(token_list: str | None, largest: int, step: int) -> tuple[int, ...]:
    """The token counts to capture, ascending.

    token_list: a JSON list of counts, or None. Without it, the counts are multiples of 8 up to 64, then four in each
    doubling, so that a step has at most a quarter of padding; the last is the smaller of `largest` and the tokens of
    the largest `step`.
    """
    if token_list is not None:
        return tuple(sorted(set(json.loads(token_list))))
    last, counts, count = min(largest, step), set(), _SMALLEST
    while count < last:
        counts.add(count)
        count += max(_SMALLEST, 1 << (count.bit_length() - 3))
    return tuple(sorted({*counts, last}))


def _counts(context: ResolutionContext) -> tuple[int, ...]:
    if context["disable_graphs"] or not context["enable_piecewise_graphs"]:
        return ()
    chunk = context["chunked_prefill_size"]
    prompts = chunk if chunk > 0 else context["max_prefill_tokens"]
    return captured_tokens(
        context["piecewise_graph_tokens"],
        context["piecewise_graph_max_tokens"],
        prompts + context["max_running_requests"],
    )


def _bytes(context: ResolutionContext) -> float:
    """Activations in the memory of the graphs, buffers between pieces, and each piece itself."""
    counts, model = _counts(context), context.model
    if not counts or model is None:
        return 0.0
    heads = 2 * (model.heads + model.kv_heads)  # queries and outputs, keys and values
    buffers = (heads * model.head_dim + model.hidden_size) * item_size(context["dtype"])
    pieces = (model.layers + 1) * len(counts)
    return float(counts[-1] * (activation_bytes_per_token(context) + buffers) + pieces * _BYTES_PER_PIECE)


def _listed_within_max(context: ResolutionContext) -> str | None:
    token_list, largest = context["piecewise_graph_tokens"], context["piecewise_graph_max_tokens"]
    if token_list is None or max(json.loads(token_list)) <= largest:
        return None
    return f"piecewise_graph_max_tokens is {largest}"


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "piecewise_graph_tokens",
        "out_of_order",
        _listed_within_max,
        "Remove the larger counts, or raise piecewise_graph_max_tokens.",
        reads=("piecewise_graph_max_tokens",),
    ),
)

ESTIMATE: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "piecewise graphs",
        _bytes,
        "they compute in memory of their own, and exchange tensors with attention in buffers",
        reads=(
            "disable_graphs",
            "enable_piecewise_graphs",
            "piecewise_graph_tokens",
            "piecewise_graph_max_tokens",
            "chunked_prefill_size",
            "max_prefill_tokens",
            "max_running_requests",
            "dtype",
        ),
    ),
)

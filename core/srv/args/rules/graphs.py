"""Rules for captured graphs: whether graphs are captured, and for which batch sizes (row counts). Torch-free.

`reserve` computes the memory that they take. `captured_rows` is used by both `srv plan` and the engine.
"""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, ResolutionContext

_GIB = 2**30
# (GiB, largest graph batch with fewer than four ranks, with four or more), for devices with less memory than that.
# Devices with more have _MAX_BATCH.
_MAX_BATCHES = ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512))
_MAX_BATCH = 512
_UNPADDED_ROWS = 32  # without padding, every row count up to this one has its own graph
_INTERVALS = ((8, 8), (256, 16), (512, 32))  # (from this row count on, interval between captured row counts)


def captured_rows(
    sizes: tuple[int, ...] | None, max_size: int | None, max_running: int, *, padding: bool, above: int = 0
) -> tuple[int, ...]:
    """Row counts of the graphs to capture, ascending.

    `sizes`: the requested row counts. If it is None, the counts are 1, 2, 4, then multiples at growing intervals, up
    to the smaller of `max_size` (None: no limit) and `max_running` (the rows that a step can have), which is the last
    count. Without `padding` a graph serves only batches of exactly its size, so that every small count is captured.
    Counts up to `above` are left out: such steps are compiled.
    """
    if sizes:
        return tuple(sorted({size for size in sizes if size > above}))
    bound = max_running if max_size is None else min(max_size, max_running)
    counts = set(range(1, _UNPADDED_ROWS + 1)) if not padding else {1, 2, 4}
    ends = [begin for begin, _ in _INTERVALS[1:]] + [max(bound, _INTERVALS[-1][0]) + 1]
    for (begin, interval), end in zip(_INTERVALS, ends, strict=True):
        counts.update(range(begin, end, interval))
    return tuple(sorted(count for count in {bound, *counts} if above < count <= bound))


def rows_compiled(context: ResolutionContext) -> int:
    """The largest row count whose steps are compiled by torch.compile, and so not captured; 0 if none is."""
    return int(context["torch_compile_max_bs"]) if context["enable_torch_compile"] else 0


def _graphs_disabled(context: ResolutionContext) -> bool:
    return bool(context["disable_graphs"]) or "graphs" not in context.capabilities


def _largest_requested(context: ResolutionContext) -> int | None:
    sizes = context["graph_batch_sizes"]
    return None if _graphs_disabled(context) or not sizes else int(max(sizes))


def _largest_that_fits(context: ResolutionContext) -> int | None:
    return None if _graphs_disabled(context) or context["graph_batch_sizes"] else default_max_graph_rows(context)


def default_max_graph_rows(context: ResolutionContext) -> int:
    """Rows of the largest graph that fits into the device memory next to weights and KV pool. Reads tp_size."""
    for below, few, many in _MAX_BATCHES:
        if context.device.memory_bytes < below * _GIB:
            return few if context["tp_size"] < 4 else many
    return _MAX_BATCH


def _sizes_within_max(context: ResolutionContext) -> str | None:
    sizes, max_size = context["graph_batch_sizes"], context["graph_max_batch_size"]
    if not sizes or max_size is None or max(sizes) <= max_size:
        return None
    return f"graph_max_batch_size is {max_size}"


def _sizes_reachable(context: ResolutionContext) -> str | None:
    sizes, max_running = context["graph_batch_sizes"], context["max_running_requests"]
    if not sizes or max(sizes) <= max_running:
        return None
    return f"no step has that many rows (max_running_requests is {max_running})"


def _needs_graphs(name: str) -> Constraint:
    """Without graphs, arguments about their capture would have no effect; they are rejected instead."""

    def check(context: ResolutionContext) -> str | None:
        return "no step is captured (disable_graphs is true)" if context[name] and context["disable_graphs"] else None

    return Constraint(
        name, "excluded", check, "Leave it out, or change the setting that disables graphs.", reads=("disable_graphs",)
    )


def _compiled_instead(name: str) -> Constraint:
    """A user who asks for the capture of steps that are compiled would not get it."""

    def check(context: ResolutionContext) -> str | None:
        value, compiled = context[name], rows_compiled(context)
        smallest = min(value) if isinstance(value, tuple) else value
        if smallest is None or smallest > compiled:
            return None
        return f"steps of up to {compiled} rows are compiled, not captured (enable_torch_compile is true)"

    remedy = "Leave it out, set it above torch_compile_max_bs, or lower torch_compile_max_bs."
    return Constraint(name, "excluded", check, remedy, reads=("enable_torch_compile", "torch_compile_max_bs"))


def _one_rank_compiled(context: ResolutionContext) -> str | None:
    ranks = context["tp_size"] * context["pp_size"]
    if not context["enable_torch_compile"] or ranks == 1:
        return None
    return f"torch.compile cannot trace the collective operations of {ranks} ranks (tp_size x pp_size)"


DEVICE_DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_graphs",
        lambda context: None if "graphs" in context.capabilities else True,
        "the platform cannot replay a captured step",
    ),
    Default(
        "graph_max_batch_size",
        _largest_requested,
        "it is the largest of graph_batch_sizes",
        reads=("disable_graphs", "graph_batch_sizes"),
    ),
    Default(
        "graph_max_batch_size",
        _largest_that_fits,
        "graphs of that size fit into the device memory next to weights and KV pool",
        reads=("disable_graphs", "graph_batch_sizes", "tp_size"),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    *(
        _needs_graphs(name)
        for name in (
            "graph_max_batch_size",
            "graph_batch_sizes",
            "disable_graph_padding",
            "enable_graph_profiling",
            "enable_graph_gc",
            "enable_piecewise_graphs",
        )
    ),
    Constraint(
        "enable_torch_compile",
        "excluded",
        _one_rank_compiled,
        "Start one rank, or leave it out.",
        reads=("tp_size", "pp_size"),
    ),
    Constraint(
        "graph_batch_sizes",
        "out_of_order",
        _sizes_within_max,
        "Remove the larger sizes, or raise graph_max_batch_size.",
        reads=("graph_max_batch_size",),
    ),
    Constraint(
        "graph_batch_sizes",
        "out_of_order",
        _sizes_reachable,
        "Remove the larger sizes, or raise max_running_requests.",
        reads=("max_running_requests",),
    ),
)

# Constraints on values that a user sets.
USER_CONSTRAINTS: tuple[Constraint, ...] = tuple(
    _compiled_instead(name) for name in ("graph_max_batch_size", "graph_batch_sizes")
)

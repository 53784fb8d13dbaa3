"""Rules of captured graphs: whether, and of how many rows. What they take of the memory is for `reserve` to say.

`captured_rows` is core's own rule, which `srv plan` shows and the engine follows. Torch-free.
"""

from __future__ import annotations

from srv.platform.facts import Constraint, Default, Seen

_GIB = 2**30
# Device memory below which the pair is the largest batch of a graph: with fewer than four ranks, with four or more.
_BATCHES = ((20, 8, 8), (35, 24, 80), (60, 32, 160), (160, 256, 512))
_LARGEST_BATCH = 512
_SINGLE_ROWS = 32  # without padding, each count up to here has a graph of its own
_LADDER = ((8, 8), (256, 16), (512, 32))  # from so many rows on, one graph for each so many


def captured_rows(sizes: tuple[int, ...] | None, most: int | None, running: int, *, padding: bool) -> tuple[int, ...]:
    """Row counts of the graphs to capture, ascending.

    `sizes` are those asked for, or None: then 1, 2, 4, and steps that grow, up to `most` (None: no bound) and
    to `running`, the rows that a step can have; the last count is that bound itself. Without `padding` a graph serves
    only batches of exactly its size, so that small counts are captured one by one.
    """
    if sizes:
        return tuple(sorted(set(sizes)))
    bound = running if most is None else min(most, running)
    counts = set(range(1, _SINGLE_ROWS + 1)) if not padding else {1, 2, 4}
    ends = [begin for begin, _ in _LADDER[1:]] + [max(bound, _LADDER[-1][0]) + 1]
    for (begin, step), end in zip(_LADDER, ends, strict=True):
        counts.update(range(begin, end, step))
    return tuple(sorted({count for count in counts if count < bound} | {bound}))


def _off(seen: Seen) -> bool:
    return bool(seen["disable_graphs"]) or "graphs" not in seen.capabilities


def _largest_asked_for(seen: Seen) -> int | None:
    sizes = seen["graph_batch_sizes"]
    return None if _off(seen) or not sizes else int(max(sizes))


def _largest_that_fits(seen: Seen) -> int | None:
    return None if _off(seen) or seen["graph_batch_sizes"] else bearable_rows(seen)


def bearable_rows(seen: Seen) -> int:
    """Rows of the largest graph that a device's memory bears beside weights and pool. Reads tp_size."""
    for below, few, many in _BATCHES:
        if seen.device.memory_bytes < below * _GIB:
            return few if seen["tp_size"] < 4 else many
    return _LARGEST_BATCH


def _sizes_agree(seen: Seen) -> str | None:
    sizes, most = seen["graph_batch_sizes"], seen["graph_max_batch_size"]
    if not sizes or most is None or max(sizes) <= most:
        return None
    return f"graph_max_batch_size is {most}"


def _sizes_are_met(seen: Seen) -> str | None:
    sizes, running = seen["graph_batch_sizes"], seen["max_running_requests"]
    if not sizes or max(sizes) <= running:
        return None
    return f"no step has so many rows (max_running_requests is {running})"


def _unused(name: str) -> Constraint:
    """What says how steps are captured would be ignored where none is."""

    def check(seen: Seen) -> str | None:
        return "no step is captured (disable_graphs is true)" if seen[name] and seen["disable_graphs"] else None

    return Constraint(
        name, "excluded", check, "Leave it out, or change what turns captured steps off.", reads=("disable_graphs",)
    )


DEVICE_DEFAULTS: tuple[Default, ...] = (
    Default(
        "disable_graphs",
        lambda seen: None if "graphs" in seen.capabilities else True,
        "the platform cannot replay a captured step",
    ),
    Default(
        "graph_max_batch_size",
        _largest_asked_for,
        "that is the largest of graph_batch_sizes",
        reads=("disable_graphs", "graph_batch_sizes"),
    ),
    Default(
        "graph_max_batch_size",
        _largest_that_fits,
        "graphs of that size fit beside weights and KV pool in the device's memory",
        reads=("disable_graphs", "graph_batch_sizes", "tp_size"),
    ),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    *(_unused(name) for name in ("graph_max_batch_size", "graph_batch_sizes", "disable_graph_padding")),
    Constraint(
        "graph_batch_sizes",
        "out_of_order",
        _sizes_agree,
        "Give no larger size, or raise graph_max_batch_size.",
        reads=("graph_max_batch_size",),
    ),
    Constraint(
        "graph_batch_sizes",
        "out_of_order",
        _sizes_are_met,
        "Give no larger size, or raise max_running_requests.",
        reads=("max_running_requests",),
    ),
)

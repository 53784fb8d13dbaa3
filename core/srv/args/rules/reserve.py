"""Device memory that stays free of weights and KV pool: core's own estimate, and a rule published for accelerators.

Both are named parts of one quantity. The estimate is made of the model's sizes, for platforms of which nobody has
published figures. A platform for whose devices the rule was published brings `published`, whose parts take the place
of the estimate's, with `published_fraction`. Nothing here knows which platforms those are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from srv.args.rules.graphs import bearable_rows, captured_rows
from srv.models.facts import ModelFacts
from srv.platform.facts import Contribution, Default, Seen

RESERVED_MEMORY = "reserved_memory"

_MIB, _GIB = 2**20, 2**30
ITEM_SIZES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
_LEAST_FRACTION, _MOST_FRACTION = 0.05, 0.88

# What the published rule sets aside beside weights and pool, in bytes (SGLang, 2026, from running it).
_RUNTIME = 512 * _MIB
_TOKEN = 1.5 * _MIB  # of a step's prompt tokens: activations and what sampling takes
_GRAPH_ROW = 2 * _MIB  # of the largest captured graph
_GRAPH_ROW_ON = 80 * _GIB  # smaller devices run smaller models
_RANK = 1024 * _MIB / 8  # a GiB of communicators at eight ranks


def item_size(dtype: str) -> int:
    """Bytes of one element; an open type ("auto") counts as the widest."""
    return ITEM_SIZES.get(dtype, 4)


def _step_tokens(seen: Seen) -> int:
    """Prompt tokens that one step may hold; without chunks, the longest prompt."""
    chunk: int = seen["chunked_prefill_size"]
    if chunk > 0:
        return chunk
    most: int = seen["max_prefill_tokens"]
    return max(most, seen.model.context_length) if seen.model else most


def _activation_bytes(seen: Seen) -> float:
    model = seen.model
    if model is None:
        return 0
    tokens = seen["max_running_requests"] + _step_tokens(seen)
    return float(tokens * (8 * model.hidden_size + 3 * _inner_size(model)) * item_size(seen["dtype"]))


def _inner_size(model: ModelFacts) -> int:
    inner = model.config.get("intermediate_size")
    return inner if isinstance(inner, int) else 4 * model.hidden_size


def _sampling_bytes(seen: Seen) -> float:
    return float(seen["max_running_requests"] * seen.model.vocab_size * 4 * 3) if seen.model else 0


def _graph_bytes(seen: Seen) -> float:
    """By the rows of the largest graph: of each what is published, its logits, kept twice, and its page table."""
    if seen["disable_graphs"] or "graphs" not in seen.capabilities:
        return 0.0
    running, most = seen["max_running_requests"], seen["graph_max_batch_size"]
    rows = captured_rows(seen["graph_batch_sizes"], most, running, padding=True)[-1]
    known = 0.0
    if seen.model is not None:
        known = 2 * 4 * seen.model.vocab_size + 4 * seen.model.context_length / seen["page_size"]
    share = min(1.0, seen.device.memory_bytes / _GRAPH_ROW_ON)
    return float(rows * (_GRAPH_ROW * share + known))


def _published_step_bytes(seen: Seen) -> float:
    """Of all replicas, where data-parallel attention gathers their tokens into one step."""
    replicas = seen["dp_size"] if seen["enable_dp_attention"] else 1
    return float(_TOKEN * _step_tokens(seen) * replicas)


def _free_fraction(seen: Seen) -> float | None:
    total = seen.device.memory_bytes
    return 1 - seen[RESERVED_MEMORY] / total if total > 0 else None


def _as_reserved(seen: Seen) -> float | None:
    free = _free_fraction(seen)
    return None if free is None or free > _MOST_FRACTION else round(max(_LEAST_FRACTION, free), 3)


def _as_most(seen: Seen) -> float | None:
    free = _free_fraction(seen)
    return None if free is None or free <= _MOST_FRACTION else _MOST_FRACTION


def _as_published(seen: Seen) -> float | None:
    free = _free_fraction(seen)
    return None if free is None else round(max(_LEAST_FRACTION, free), 3)


FRACTIONS: tuple[Default, ...] = (
    Default("mem_fraction_static", _as_reserved, f"{RESERVED_MEMORY} stays free", reads=(RESERVED_MEMORY,)),
    Default(
        "mem_fraction_static",
        _as_most,
        f"12 % stays free, more than {RESERVED_MEMORY}, which is an estimate: nobody has published figures",
        reads=(RESERVED_MEMORY,),
    ),
)

ESTIMATE: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "activations",
        _activation_bytes,
        "a step of the largest size needs that much between two layers",
        reads=("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "dtype"),
    ),
    Contribution(
        RESERVED_MEMORY,
        "sampling",
        _sampling_bytes,
        "each running request has float32 logits, probabilities and a sorted copy",
        reads=("max_running_requests",),
    ),
    Contribution(
        RESERVED_MEMORY,
        "runtime",
        lambda seen: min(_RUNTIME, seen.device.memory_bytes // 16),
        "libraries and the allocator's slack take some",
    ),
    Contribution(
        RESERVED_MEMORY,
        "graphs",
        _graph_bytes,
        "captured graphs keep buffers of their own: each row of the largest some MiB, logits and page table",
        reads=("disable_graphs", "graph_max_batch_size", "graph_batch_sizes", "max_running_requests", "page_size"),
    ),
    Contribution(
        RESERVED_MEMORY,
        "ranks",
        lambda seen: float((seen["tp_size"] * seen["pp_size"] - 1) * _RANK),
        "the communicator has buffers of 128 MiB for each further rank",
        reads=("tp_size", "pp_size"),
    ),
)


def published(rows: Callable[[Seen], int] = bearable_rows) -> tuple[Contribution, ...]:
    """Parts for platforms that have a published rule: it goes by tokens, rows and ranks, whatever the model.

    rows: of the largest graph where nobody names them; it may read tp_size. They count even where graphs are off, for
    the rule has no figure without them.
    """

    def graph_bytes(seen: Seen) -> float:
        said = seen["graph_max_batch_size"]
        return float(_GRAPH_ROW * (rows(seen) if said is None else said))

    return (
        Contribution(
            RESERVED_MEMORY,
            "runtime",
            lambda seen: _RUNTIME,
            "the published rule keeps 512 MiB for libraries and the allocator's slack",
            instead_of=("runtime",),
        ),
        Contribution(
            RESERVED_MEMORY,
            "steps",
            _published_step_bytes,
            "the published rule keeps 1.5 MiB for each prompt token of a step",
            reads=("chunked_prefill_size", "max_prefill_tokens", "enable_dp_attention", "dp_size"),
            instead_of=("activations", "sampling"),
        ),
        Contribution(
            RESERVED_MEMORY,
            "graphs",
            graph_bytes,
            "the published rule keeps 2 MiB for each row of the largest graph that the device bears",
            reads=("graph_max_batch_size", "tp_size"),
            instead_of=("graphs",),
        ),
        Contribution(
            RESERVED_MEMORY,
            "ranks",
            lambda seen: float(seen["tp_size"] * seen["pp_size"] * _RANK),
            "the published rule keeps 128 MiB for each rank's communicators",
            reads=("tp_size", "pp_size"),
            instead_of=("ranks",),
        ),
    )


def published_fraction() -> Default:
    """What goes with `published`: all that its sum leaves."""
    return Default("mem_fraction_static", _as_published, f"{RESERVED_MEMORY} stays free", reads=(RESERVED_MEMORY,))

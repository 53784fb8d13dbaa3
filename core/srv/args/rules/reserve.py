"""Device memory that is reserved, i.e. not used for weights and KV pool: core's estimate, and a published rule.

Both are named parts of one quantity. Core's estimate uses the sizes of the model; it is for platforms without published
figures. SGLang has published a rule for some accelerators; their platforms use `published_contributions`, whose parts
replace those of the estimate, and `published_fraction`. This module must not know which platforms those are.
"""

from __future__ import annotations

from collections.abc import Callable

from srv.args.rules.graphs import captured_rows, default_max_graph_rows, rows_compiled
from srv.dtypes import item_size
from srv.models.facts.special_layers import special_layers
from srv.platform.facts import Contribution, Default, ResolutionContext
from srv.specs import ModelFacts

RESERVED_MEMORY = "reserved_memory"
SAMPLING_BYTES_PER_LOGIT = 3 * 4  # float32 logits, probabilities and a sorted copy

_MIB, _GIB = 2**20, 2**30
_COMPILER = 256 * _MIB  # observed: 70 to 180 MiB
_MIN_FRACTION, _MAX_FRACTION = 0.05, 0.88

# Bytes that the published rule reserves (SGLang, 2026, observed by running it).
_RUNTIME = 512 * _MIB
_BYTES_PER_TOKEN = 1.5 * _MIB  # per prompt token of a step: activations and sampling
_BYTES_PER_GRAPH_ROW = 2 * _MIB  # per row of the largest captured graph
_GRAPH_ROW_DEVICE_MEMORY = 80 * _GIB  # for which _BYTES_PER_GRAPH_ROW holds; smaller devices run smaller models
_BYTES_PER_RANK = 1024 * _MIB / 8  # per rank: communicators take 1 GiB with eight ranks


def _step_tokens(context: ResolutionContext) -> int:
    """The largest number of prompt tokens in one step; without chunked prefill, those of the longest prompts.

    With data-parallel attention, those of all replicas, which a step gathers.
    """
    chunk: int = context["chunked_prefill_size"]
    if chunk > 0:
        return chunk
    limit: int = context["max_prefill_tokens"]
    replicas: int = context["dp_size"] if context["enable_dp_attention"] else 1
    return replicas * (max(limit, context.model.context_length) if context.model else limit)


def _activation_bytes(context: ResolutionContext) -> float:
    running: int = context["max_running_requests"]
    tokens = running + _step_tokens(context)
    recurrent = special_layers(context.model).recurrent if context.model else None
    states = running * recurrent.row_bytes(item_size(context["dtype"])) if recurrent else 0
    return tokens * activation_bytes_per_token(context) + states


def activation_bytes_per_token(context: ResolutionContext) -> float:
    """What a step needs between two layers and in the layer that needs most, for each of its tokens. Reads dtype."""
    model = context.model
    if model is None:
        return 0.0
    item, hidden, layers = item_size(context["dtype"]), model.hidden_size, special_layers(model)
    inner = 3 * _inner_size(model) * item
    if layers.mixture is not None:
        inner = max(inner, layers.mixture.step_bytes(item))
    if layers.recurrent is not None:
        inner = max(inner, layers.recurrent.step_bytes(item))
    widths = sum(layer.step_bytes(item) for layer in (layers.streams, layers.inputs) if layer is not None)
    return float(8 * hidden * item + inner + widths)


def _inner_size(model: ModelFacts) -> int:
    inner = model.config.get("intermediate_size")
    if isinstance(inner, list) and inner:  # of each layer
        return max(int(size) for size in inner)
    return inner if isinstance(inner, int) else 4 * model.hidden_size


def _sampling_bytes(context: ResolutionContext) -> float:
    model = context.model
    return float(context["max_running_requests"] * model.vocab_size * SAMPLING_BYTES_PER_LOGIT) if model else 0


def _graph_bytes(context: ResolutionContext) -> float:
    """Bytes of the largest graph: per row the published figure, its logits (kept twice) and its page tables."""
    if context["disable_graphs"] or "graphs" not in context.capabilities:
        return 0.0
    running, max_rows = context["max_running_requests"], context["graph_max_batch_size"]
    captured = captured_rows(
        context["graph_batch_sizes"], max_rows, running, padding=True, above=rows_compiled(context)
    )
    rows = captured[-1] if captured else 0
    model_bytes = 0.0
    if context.model is not None:
        tables = 4 * len(context.model.cache_groups) * context.model.context_length / context["page_size"]
        model_bytes = 2 * 4 * context.model.vocab_size + tables
    share = min(1.0, context.device.memory_bytes / _GRAPH_ROW_DEVICE_MEMORY)
    return float(rows * (_BYTES_PER_GRAPH_ROW * share + model_bytes))


def _compiler_bytes(context: ResolutionContext) -> float:
    in_host_memory = context["enable_torch_compile"] and "host_memory" in context.capabilities
    return float(_COMPILER) if in_host_memory else 0.0


def _published_step_bytes(context: ResolutionContext) -> float:
    return float(_BYTES_PER_TOKEN * _step_tokens(context))


def _free_fraction(context: ResolutionContext) -> float | None:
    total = context.device.memory_bytes
    return 1 - context[RESERVED_MEMORY] / total if total > 0 else None


def _fraction_below_max(context: ResolutionContext) -> float | None:
    free = _free_fraction(context)
    return None if free is None or free > _MAX_FRACTION else round(max(_MIN_FRACTION, free), 3)


def _fraction_at_max(context: ResolutionContext) -> float | None:
    free = _free_fraction(context)
    return None if free is None or free <= _MAX_FRACTION else _MAX_FRACTION


def _fraction_published(context: ResolutionContext) -> float | None:
    free = _free_fraction(context)
    return None if free is None else round(max(_MIN_FRACTION, free), 3)


FRACTIONS: tuple[Default, ...] = (
    Default("mem_fraction_static", _fraction_below_max, f"{RESERVED_MEMORY} stays free", reads=(RESERVED_MEMORY,)),
    Default(
        "mem_fraction_static",
        _fraction_at_max,
        f"12 % stays free, more than {RESERVED_MEMORY}, which is an estimate: no published figures exist",
        reads=(RESERVED_MEMORY,),
    ),
)

ESTIMATE: tuple[Contribution, ...] = (
    Contribution(
        RESERVED_MEMORY,
        "activations",
        _activation_bytes,
        "a step of the largest size needs that much between two layers, and in experts and recurrent layers",
        reads=(
            "chunked_prefill_size",
            "max_prefill_tokens",
            "max_running_requests",
            "dtype",
            "enable_dp_attention",
            "dp_size",
        ),
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
        lambda context: min(_RUNTIME, context.device.memory_bytes // 16),
        "libraries and allocator slack need some memory",
    ),
    Contribution(
        RESERVED_MEMORY,
        "graphs",
        _graph_bytes,
        "captured graphs have their own buffers: per row of the largest graph some MiB, logits and page table",
        reads=(
            "disable_graphs",
            "graph_max_batch_size",
            "graph_batch_sizes",
            "max_running_requests",
            "page_size",
            "enable_torch_compile",
            "torch_compile_max_bs",
        ),
    ),
    Contribution(
        RESERVED_MEMORY,
        "compiler",
        _compiler_bytes,
        "torch.compile and the code that it makes are in the memory that the device computes in",
        reads=("enable_torch_compile",),
    ),
    Contribution(
        RESERVED_MEMORY,
        "ranks",
        lambda context: float((context["tp_size"] * context["pp_size"] - 1) * _BYTES_PER_RANK),
        "the communicator has buffers of 128 MiB per additional rank",
        reads=("tp_size", "pp_size"),
    ),
)


def published_contributions(
    rows: Callable[[ResolutionContext], int] = default_max_graph_rows,
) -> tuple[Contribution, ...]:
    """Contributions of platforms with a published rule, which depends on tokens, rows and ranks, not on the model.

    `rows` gives the rows of the largest graph when neither graph_batch_sizes nor graph_max_batch_size is set; it may
    read tp_size. They count even when graphs are off, because the rule has no figure without them.
    """

    def graph_bytes(context: ResolutionContext) -> float:
        sizes, max_rows = context["graph_batch_sizes"], context["graph_max_batch_size"]
        max_rows = max(sizes) if sizes else max_rows
        return float(_BYTES_PER_GRAPH_ROW * (rows(context) if max_rows is None else max_rows))

    return (
        Contribution(
            RESERVED_MEMORY,
            "runtime",
            lambda context: _RUNTIME,
            "the published rule reserves 512 MiB for libraries and allocator slack",
            replaces=("runtime",),
        ),
        Contribution(
            RESERVED_MEMORY,
            "steps",
            _published_step_bytes,
            "the published rule reserves 1.5 MiB per prompt token of a step",
            reads=("chunked_prefill_size", "max_prefill_tokens", "enable_dp_attention", "dp_size"),
            replaces=("activations", "sampling"),
            for_default=True,
        ),
        Contribution(
            RESERVED_MEMORY,
            "graphs",
            graph_bytes,
            "the published rule reserves 2 MiB per row of the largest graph that fits the device",
            reads=("graph_batch_sizes", "graph_max_batch_size", "tp_size"),
            replaces=("graphs",),
        ),
        Contribution(
            RESERVED_MEMORY,
            "dp_attention",
            lambda context: 4.0 * _GIB if context["enable_dp_attention"] else 0.0,
            "the published rule reserves 4 GiB for the tokens of all replicas",
            reads=("enable_dp_attention",),
        ),
        Contribution(
            RESERVED_MEMORY,
            "ranks",
            lambda context: float(context["tp_size"] * context["pp_size"] * _BYTES_PER_RANK),
            "the published rule reserves 128 MiB per rank for communicators",
            reads=("tp_size", "pp_size"),
            replaces=("ranks",),
        ),
    )


def published_fraction() -> Default:
    """The default that goes with `published_contributions`: the memory that their sum leaves free."""
    return Default(
        "mem_fraction_static", _fraction_published, f"{RESERVED_MEMORY} stays free", reads=(RESERVED_MEMORY,)
    )

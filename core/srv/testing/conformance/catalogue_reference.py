"""Checks of level 2, comparisons with a reference, in the order in which they run. Torch-free."""

from __future__ import annotations

from srv.testing.conformance.catalogue_device import POOL, STARTED
from srv.testing.conformance.model import Check, Level

_FIRST = (*POOL, "pool.page_zero", "pool.cache_specs", "attention.placement", "attention.inputs")
_ATTENTION = (*_FIRST, "attention.single_page")
_PAGED = (*_ATTENTION, "attention.several_pages", "attention.page_boundaries")
_CHUNKED = (*_PAGED, "attention.long_rows", "attention.mixed", "attention.extend")
_OPS = (*STARTED, "op.coverage", "op.placement")
# Of attention and captured steps: without them, a wrong result says nothing about the feature that a check adds.
_BLOCKING = (*_ATTENTION, "attention.writes", "attention.several_pages", "graph.replay")


def _reference_check(
    name: str, summary: str, remedy: str, after: tuple[str, ...], needs: str = "", module: str = "attention"
) -> Check:
    target = f"{module}:{name.partition('.')[2]}"
    blocks = name in _BLOCKING or not name.startswith(("attention.", "graph."))
    return Check(name, Level.L2, summary, target, remedy, needs=needs, after=after, blocks=blocks, seconds=300.0)


def _op_check(name: str, summary: str, remedy: str, after: tuple[str, ...] = _OPS, needs: str = "") -> Check:
    return _reference_check(f"op.{name}", summary, remedy, after, needs, module="ops")


_COMPARE_OP = "Compare with the op's float64 oracle in srv_kernels.oracles for the inputs in the message."
_EXPERT_OPS = ("route_experts", "experts", "experts_int8", "experts_gguf", "experts_fp8")
_COMPARE_EXPERTS = "Compare with the op's float64 oracle in srv_kernels.expert_oracles for the inputs in the message."

L2 = (
    _op_check(
        "coverage",
        "every op that models need has an implementation in each declared dtype; plans and layers choose alike",
        "Add an OpImpl for it; the plain torch functions of srv_kernels.reference may be its target.",
        STARTED,
    ),
    _op_check(
        "placement",
        "ops return tensors on the platform's device",
        "Allocate results on the device of the arguments.",
        (*STARTED, "op.coverage"),
    ),
    _op_check("rms_norm", "rms_norm satisfies its contract in every dtype that it supports", _COMPARE_OP),
    _op_check("add_rms_norm", "add_rms_norm satisfies its contract in every dtype that it supports", _COMPARE_OP),
    _op_check("rotary", "rotary satisfies its contract in every dtype that it supports", _COMPARE_OP),
    _op_check("silu_and_mul", "silu_and_mul satisfies its contract in every dtype that it supports", _COMPARE_OP),
    _op_check(
        "linear_w8a8", "linear_w8a8 satisfies its contract in every dtype that it supports", _COMPARE_OP, needs="w8a8"
    ),
    _op_check(
        "linear_w8a8_static",
        "linear_w8a8_static satisfies its contract in every dtype that it supports",
        _COMPARE_OP,
        needs="w8a8",
    ),
    _op_check(
        "linear_int8",
        "linear_int8 satisfies its contract in every dtype that it supports",
        _COMPARE_OP,
        needs="int8_weights",
    ),
    _op_check(
        "linear_fp8",
        "linear_fp8 satisfies its contract in every dtype that it supports",
        _COMPARE_OP,
        needs="fp8_weights",
    ),
    _op_check(
        "linear_gguf",
        "linear_gguf satisfies its contract in every dtype that it supports",
        _COMPARE_OP,
        needs="gguf_blocks",
    ),
    _op_check(
        "rows_gguf",
        "rows_gguf, the embedding lookup in GGUF weights, satisfies its contract in every dtype that it supports",
        _COMPARE_OP,
        needs="gguf_blocks",
    ),
    *(
        _op_check(name, f"{name} satisfies its contract in every dtype that it supports", _COMPARE_EXPERTS)
        for name in _EXPERT_OPS
    ),
    _reference_check(
        "experts.loaded",
        "experts satisfy the contract of their op after post_load, with each backend of the family moe",
        "post_load may give experts another kernel only if `implementation` is its own; compare it with the op.",
        (*_OPS, *(f"op.{name}" for name in _EXPERT_OPS)),
        module="experts",
    ),
    _op_check("others", "every other op of the plugin satisfies its contract; the message names them", _COMPARE_OP),
    Check(
        "op.batch_invariant",
        Level.L2,
        "ops, and products with weights, give a row the same bits with any other rows, if the plugin declares it",
        "invariance:op_rows",
        "Add up a row's elements in an order that does not depend on other rows, or do not declare batch_invariant.",
        after=(*_OPS, "op"),
        seconds=300.0,
    ),
    _reference_check(
        "attention.placement",
        "attention returns a tensor of q's shape and dtype on the platform's device",
        "Return [tokens, heads, head_dim] of q's dtype, on q's device.",
        POOL,
    ),
    _reference_check(
        "attention.inputs",
        "attention leaves q, k and v as they are",
        "Only the pool may be written in place: scale or rotate copies of the arguments.",
        (*POOL, "attention.placement"),
    ),
    _reference_check(
        "attention.writes",
        "steps store keys and values in the slots of their tokens, and change no others; reading is judged apart",
        "Token t of row i belongs in page page_table[i, t // page_size], at t % page_size. The checks after this one "
        "store keys and values themselves, and judge how they are read.",
        _FIRST,
        module="attention_writes",
    ),
    _reference_check(
        "attention.single_page",
        "attention is correct for rows that fit in one page",
        "Compare one row with srv.models.transformers.hf_check.dense_attention, first a prompt, then its next token. "
        "If it fails only where operators run asynchronously, copy host values through `context.transfers`.",
        _FIRST,
    ),
    _reference_check(
        "attention.several_pages",
        "attention is correct for rows of several pages, anywhere in the pool",
        "Token t of row i lies in page page_table[i, t // page_size], at t % page_size.",
        _ATTENTION,
    ),
    _reference_check(
        "attention.page_boundaries",
        "attention is correct for rows that end before, at and after a page boundary, in pages of 4 to 128 tokens",
        "A row of kv_len tokens has ceil(kv_len / page_size) pages; check how many of them are read and written.",
        (*_ATTENTION, "attention.several_pages"),
    ),
    _reference_check(
        "attention.long_rows",
        "attention is correct for prompts and output of rows of many hundred tokens, next to short rows",
        "If the keys of a row are divided among programs, check how their parts are combined, and rows with fewer "
        "parts than others.",
        _PAGED,
    ),
    _reference_check(
        "attention.scale",
        "attention is correct for layers whose scale is not 1 / sqrt(head_dim)",
        "Multiply q.k by AttentionLayer.scale, which models set as they like.",
        _PAGED,
    ),
    _reference_check(
        "attention.large_scores",
        "attention is correct for scores whose exponentials are infinite or 0 in float32, as those of large key biases",
        "Subtract the largest score of a row from all of them before exp; begin with -inf as the largest, not with 0.",
        _PAGED,
    ),
    _reference_check(
        "attention.gqa",
        "attention is correct if query heads share KV heads",
        "Query heads h * n to h * n + n - 1 read KV head h, with n = heads / kv_heads.",
        _PAGED,
    ),
    _reference_check(
        "attention.strides",
        "attention is correct for q, k and v that are views of one wide tensor, as a fused projection returns them",
        "Read q, k and v by their strides, where they are attended to and where they are stored, or copy them first "
        "(`contiguous`).",
        (*_PAGED, "attention.gqa"),
    ),
    _reference_check(
        "attention.mixed",
        "attention is correct for prompts and output tokens in one step, of few and many rows",
        "Rows follow each other along the token axis, with query_lens[i] tokens each.",
        (*_PAGED, "attention.long_rows", "attention.gqa"),
    ),
    _reference_check(
        "attention.extend",
        "attention is correct for prompts that are computed in chunks, also after a long prefix",
        "The first query of row i has position kv_lens[i] - query_lens[i]; it attends to itself and all tokens "
        "before it.",
        (*_PAGED, "attention.long_rows", "attention.mixed"),
        "chunked_prefill",
    ),
    _reference_check(
        "attention.sharing",
        "attention is correct for rows that share their first pages",
        "Read pages through the row's own page table; write only the tokens of the step.",
        _CHUNKED,
        "prefix_cache",
    ),
    _reference_check(
        "attention.same_step",
        "attention is correct for rows that share pages that the same step writes",
        "Write the keys and values of all rows before any row attends; the rows of a captured step with drafts are the "
        "tokens of a few sequences.",
        _PAGED,
    ),
    Check(
        "attention.steps",
        Level.L2,
        "hundreds of steps leave neither memory nor objects behind",
        "steps:kept",
        "Keep what belongs to one step in the result of `plan`; events, streams and tensors must not be collected.",
        after=(*_PAGED, "copies.ring", "pool.allocator"),
        blocks=False,
        seconds=300.0,
    ),
    _reference_check(
        "attention.batch_invariant",
        "attention gives a row the same bits with other rows and in other chunks, if a backend declares it",
        "Add up keys in an order that depends on the row alone, or do not declare BackendSpec.batch_invariant.",
        _CHUNKED,
        module="invariance",
    ),
    _reference_check(
        "attention.device_lengths",
        "attention is correct for rows whose lengths only the device knows, if a backend declares it",
        'Read the lengths from AttentionBatch.lengths: kv_lens are bounds then; or declare BackendSpec.lengths="host".',
        _CHUNKED,
    ),
    _reference_check(
        "attention.layers",
        "each layer has its own keys and values",
        "AttentionLayer.index is the index of the layer's tensors in the pool.",
        _PAGED,
    ),
    _reference_check(
        "attention.results",
        "a result keeps its values while later layers and steps are computed",
        "Return a new tensor from every call of forward.",
        _PAGED,
    ),
    _reference_check(
        "attention.unused_columns",
        "attention is correct with a page table that is wider than every row",
        "Read only the columns of a row that its kv_len needs.",
        _PAGED,
    ),
    _reference_check(
        "attention.window",
        "attention is correct in layers with a sliding window, if the backend accepts such models",
        "A token attends to itself and the window - 1 tokens before it; if the kernels do not support this, "
        "remove the trait from BackendSpec.traits.",
        _CHUNKED,
    ),
    _reference_check(
        "attention.window_pages",
        "what the pages behind a sliding window hold does not change the result",
        "These pages are freed and may belong to other requests; do not read them, or select with torch.where instead "
        "of multiplying by a weight of 0, which keeps NaN.",
        (*_CHUNKED, "attention.window"),
    ),
    _reference_check(
        "attention.groups",
        "attention is correct in two cache groups, one of them with a sliding window, whose layers follow one another",
        "A backend is built per cache group: what `plan` prepares belongs to its result or to the instance, not to the "
        "class or the module.",
        (*_CHUNKED, "attention.layers", "attention.window"),
    ),
    _reference_check(
        "attention.soft_cap",
        "attention is correct with capped scores, also in a sliding window, if the backend accepts such models",
        "Scores become soft_cap * tanh(scores / soft_cap) before masking; if the kernels do not support this, "
        "remove the trait from BackendSpec.traits.",
        (*_PAGED, "attention.window"),
    ),
    _reference_check(
        "attention.latent",
        "multi-head latent attention is correct, if a backend names a class for it",
        "See srv.platform.latent: k are the compressed vectors and v the rotary keys, head h has the key "
        "up[h, :key_dim] @ c and the value up[h, key_dim:] @ c of a compressed vector c.",
        STARTED,
        module="latent",
    ),
    _reference_check(
        "attention.alibi",
        "attention is correct with linear position biases (ALiBi), if the backend accepts such models",
        "AttentionLayer.alibi[head] * (position of the key - position of the query) is added to a scaled score; if the "
        "kernels do not support this, remove the trait from BackendSpec.traits.",
        _PAGED,
    ),
    _reference_check(
        "attention.sinks",
        "attention is correct with attention sinks, if the backend accepts such models",
        "AttentionLayer.sink_scores[head] is one more score of the softmax, neither scaled nor capped, and has no "
        "value; where keys are divided, it counts once. If the kernels do not support this, remove the trait from "
        "BackendSpec.traits.",
        _PAGED,
        module="attention_reach",
    ),
    _reference_check(
        "attention.chunks",
        "attention is correct within chunks, if the backend accepts such models",
        "A token attends only to tokens of its own chunk of AttentionLayer.chunk positions; if the kernels do not "
        "support this, remove the trait from BackendSpec.traits.",
        _PAGED,
        module="attention_reach",
    ),
    _reference_check(
        "attention.temperature",
        "attention is correct if scores grow with the position, if the backend accepts such models",
        "Scores of a query at position p, after the soft cap, are multiplied by ln(p) / ln(n) if p is larger than n, "
        "which is AttentionLayer.temperature_from. If the kernels do not support this, remove the trait from "
        "BackendSpec.traits.",
        _PAGED,
        module="attention_reach",
    ),
    _reference_check(
        "attention.both_ways",
        "attention to earlier and later tokens is correct, if the backend accepts encoders",
        "Of a layer with AttentionLayer.bidirectional nothing is stored: each row is a whole sequence, whose keys and "
        "values are those of the step. If the kernels do not support this, remove the trait from BackendSpec.traits.",
        STARTED,
        module="attention_reach",
    ),
    _reference_check(
        "attention.dtypes",
        "attention is correct in every dtype that is declared and accepted",
        "Return Unfit from BackendSpec.check for a dtype that the kernels do not support.",
        _PAGED,
    ),
    _reference_check(
        "attention.int8_kv",
        "attention is correct with an int8 KV pool, with a scale per token and head",
        "Quantize per token and head, with scale = largest magnitude / 127; see KVLayout.",
        (*_PAGED, "attention.gqa", "attention.dtypes"),
        "int8_kv",
    ),
    _reference_check(
        "attention.fp8_kv",
        "attention is correct with KV pools of 8-bit floats of both formats, with scales per layer",
        "Divide by KVBuffers.scales of the layer, limit to the largest finite number (448 or 57344; a cast may give "
        "NaN or infinity) and round to nearest; multiply "
        "what is read; see KVLayout.",
        (*_PAGED, "attention.gqa", "attention.layers", "attention.dtypes"),
        "fp8_kv",
        "fp8_kv",
    ),
    _reference_check(
        "attention.head_dims",
        "attention is correct for every head size that a backend accepts",
        "Return Unfit from BackendSpec.check for head sizes that the kernels do not support.",
        (*_PAGED, "attention.gqa", "attention.dtypes"),
    ),
    _reference_check(
        "attention.undeclared",
        "no undeclared dtype works",
        "Declare the dtype, or let BackendSpec.check refuse it.",
        _PAGED,
    ),
    Check(
        "features.undeclared",
        Level.L2,
        "no capability works that is not declared, of those with ops, of chunks and of shared prefixes",
        "undeclared:features",
        "Declare the capability, or do nothing: it is not used.",
        after=(*_OPS, *_PAGED),
        seconds=300.0,
    ),
)

# The graph checks compute prompts eagerly, in two layers, with page tables wider than a row: these checks come first.
_EAGER = ("attention.writes", *_PAGED, "attention.strides", "attention.layers", "attention.unused_columns")
_CAPTURED = (*_EAGER, "graph.declared")


def _graph_check(name: str, summary: str, remedy: str, after: tuple[str, ...] = (*_CAPTURED, "graph.replay")) -> Check:
    return _reference_check(f"graph.{name}", summary, remedy, after, "graphs", module="graphs")


_STATIC_BUFFERS = (
    "Tensors that a captured kernel reads must keep their addresses: `plan` copies into those of AttentionBatch.graph."
)
# With as many KV heads as query heads, before other numbers and several groups.
_OF_ONE_GROUP = ("graph.replay", "graph.lengths", "graph.padding", "graph.row_counts", "graph.back_to_back")
GRAPHS = (
    _graph_check(
        "replay", "a captured step is correct when it is replayed with new inputs", _STATIC_BUFFERS, _CAPTURED
    ),
    _graph_check(
        "lengths",
        "a replay uses the lengths and pages of its own step, not those of the capture",
        "Apply the host lengths of `metadata` in Graphs.replay, or keep them in device tensors that `plan` rewrites.",
        (*_CAPTURED, "attention.long_rows", "attention.device_lengths", "graph.replay"),
    ),
    _graph_check(
        "padding",
        "padded rows of a captured step do not change the others",
        "Padded rows have only page 0 and a length of 1; they may write only to page 0.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
    ),
    _graph_check(
        "row_counts",
        "captured steps with different row counts can be replayed alternately, and one with many rows",
        "Store the state of a captured step by its key.",
        (*_CAPTURED, "attention.mixed", "graph.replay", "graph.lengths", "graph.padding"),
    ),
    _graph_check(
        "back_to_back",
        "a replay may be launched while the previous one of the same captured step runs",
        "In Graphs.replay, wait for the previous replay if its inputs would be overwritten.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
    ),
    Check(
        "graph.steps",
        Level.L2,
        "replays leave neither memory nor objects behind",
        "steps:replays",
        "Keep what belongs to one step in the result of `plan`; replace what a replay keeps at the next one.",
        needs="graphs",
        after=(*_CAPTURED, "attention.steps", *_OF_ONE_GROUP),
        seconds=300.0,
    ),
    _graph_check(
        "gqa",
        "a captured step is correct if query heads share KV heads",
        "Query heads h * n to h * n + n - 1 read KV head h, in captured steps as in others.",
        (*_CAPTURED, "attention.gqa", "attention.mixed", *_OF_ONE_GROUP),
    ),
    _graph_check(
        "groups",
        "a captured step is correct with two cache groups, one of them with a sliding window",
        "A window hides keys in captured steps, too. Each cache group has a backend, and static buffers of its own; "
        "Graphs.replay gets the metadata of each group.",
        (*_CAPTURED, "attention.window", "attention.groups", *_OF_ONE_GROUP),
    ),
    _graph_check(
        "traits",
        "a captured step is correct with other scales, and the declared ones of sinks, soft_cap, alibi, chunks and "
        "temperature",
        "The captured kernel needs what the layer has, as the eager one does. Where steps with such layers cannot be "
        "captured, say graphs=False, or remove the trait.",
        (
            *(
                *_CAPTURED,
                "attention.scale",
                "attention.sinks",
                "attention.soft_cap",
                "attention.alibi",
                "attention.chunks",
                "attention.temperature",
            ),
            *(*_OF_ONE_GROUP, "graph.gqa", "graph.groups"),
        ),
    ),
    Check(
        "graph.latent",
        Level.L2,
        "a captured step of multi-head latent attention is correct, with other lengths, rows and padding",
        "latent:captured",
        "What `plan` returns for AttentionBatch.graph keeps its addresses, and so does what `prepare` derives from the "
        "up-projection.",
        needs="graphs",
        after=(*_FIRST, "graph.declared", "attention.latent"),
        blocks=False,
        seconds=300.0,
    ),
    _graph_check(
        "kv_dtypes",
        "a captured step is correct over KV pools of int8 and of 8-bit floats, as far as they are declared",
        "Quantize and read keys and values in captured steps as in others; see KVLayout.",
        (*_CAPTURED, "attention.int8_kv", "attention.fp8_kv", *_OF_ONE_GROUP, "graph.gqa"),
    ),
    _reference_check(
        "graph.pieces",
        "pieces of a captured pass have the bits of the same work without a capture, for other inputs and padding",
        "A piece must read and write the same memory at each replay. Memory that a later piece reads, or that the "
        "host still refers to, must not be used again.",
        _CAPTURED,
        "piecewise_graphs",
        module="pieces",
    ),
    Check(
        "graph.communicator",
        Level.L2,
        "a replay repeats the operations of a communicator, if the plugin has one",
        "ranks:captured",
        "Enqueue all_reduce and all_gather where a capture records them, such as on the current stream.",
        needs="graphs",
        after=(*_CAPTURED, "graph.replay", "platform.communicator"),
        seconds=300.0,
    ),
)

"""Checks of level 1 (rules that hold on any device) and level 2 (comparisons with a reference), in the order in which
they run. Torch-free.
"""

from __future__ import annotations

from srv.testing.conformance.model import Check, Level

_DEVICE = ("platform.starts", "platform.patches", "platform.device")
_STARTED = (*_DEVICE, "copies.staging", "platform.events")
_POOL = (*_STARTED, "pool.shapes", "pool.placement")
_SAMPLER = (*_STARTED, "sampler.placement", "sampler.distribution")


def _device_check(name: str, summary: str, remedy: str, after: tuple[str, ...] = _STARTED, needs: str = "") -> Check:
    target = name.replace(".", ":").replace("graph:", "graphs:").replace("pool:cache_", "pool_specs:cache_")
    return Check(name, Level.L1, summary, target, remedy, needs=needs, after=after, seconds=120.0)


L1 = (
    _device_check(
        "platform.starts",
        "create returns a platform that satisfies the contract, and init_worker initializes it",
        "Run `srv doctor`; implement all members of srv.platform.interface.Platform, and no other public ones.",
        (),
    ),
    _device_check(
        "platform.patches",
        "create does not change srv",
        "Extend srv through the platform object; assign nothing to its modules or classes.",
        ("platform.starts",),
    ),
    _device_check(
        "platform.device",
        "device(0) holds tensors, computes on them, and results stay there",
        "Return the torch.device that this rank's tensors live on.",
        ("platform.starts", "platform.patches"),
    ),
    _device_check(
        "platform.memory",
        "0 <= free <= total, and the total is within a factor of 2 of DeviceFacts.memory_bytes",
        "Return the bytes of one device, as its driver reports them, in ProbeResult and in memory().",
        _DEVICE,
    ),
    _device_check(
        "copies.staging",
        "staging returns new host memory of the requested shape and dtype at every call",
        "Allocate page-locked host memory at every call: core keeps it, and the device copies from it by itself.",
        _DEVICE,
    ),
    _device_check(
        "platform.events",
        "work enqueued before an event is complete after waiting for the event",
        "Return Streams, and record events on the stream that torch's operators and copies use.",
        (*_DEVICE, "copies.staging"),
    ),
    _device_check(
        "copies.streams",
        "a stream that waits for an event of another stream sees what was enqueued before the event",
        "Stream.wait delays the stream's later work, and Stream.use makes it this thread's current stream.",
        _STARTED,
    ),
    _device_check(
        "copies.ring",
        "steps in flight read and return their own values while staging memory is reused from step to step",
        "A copy with non_blocking=True belongs to the current stream; record events behind everything enqueued there.",
        (*_STARTED, "copies.streams"),
    ),
    _device_check(
        "platform.diagnose",
        "diagnose returns checks, and every failed one has a remedy",
        "Return a list of srv.platform.interface.Check with name and detail, and a remedy if ok is False.",
        _DEVICE,
    ),
    _device_check(
        "pool.shapes",
        "kv_buffers returns a key and a value tensor per layer, with pages + 1 pages, in the given layout",
        "Allocate pages + 1 pages of layout.page_size tokens for each of layout.group.layers, of layout.dtype.",
    ),
    _device_check(
        "pool.placement",
        "every tensor of the pool is on the platform's device",
        "Allocate with device=self.device(local_rank).",
        (*_STARTED, "pool.shapes"),
    ),
    _device_check(
        "pool.page_zero",
        "a new pool is finite, including page 0",
        "Zero the pool; only memory that attention never reads may stay uninitialized.",
        _POOL,
    ),
    _device_check(
        "pool.cache_specs",
        "pools of every cache spec have the named tensors of KVLayout, which share no memory, in the budget's sizes",
        "Allocate a tensor per name of layout.names() and layer (srv.platform.pools.plain_pool does), or raise "
        "NotImplementedError for specs that the platform does not support.",
        (*_POOL, "pool.page_zero"),
    ),
    _device_check(
        "copies.pages",
        "copy_pages copies whole pages of every layer between device and staging memory, and no others",
        "Copy each (from, to) of `pages` for all layers, keys and values alike.",
        (*_POOL, "pool.cache_specs"),
    ),
    _device_check(
        "pool.allocator",
        "the memory of a released pool is freed or reused by the next pool",
        "Keep no reference to tensors that kv_buffers returned.",
        (*_POOL, "platform.memory"),
    ),
    _device_check(
        "pool.accounting",
        "memory() accounts for a pool",
        "Return the memory that is free now according to the driver, not at start-up.",
        (*_POOL, "platform.memory"),
    ),
    _device_check(
        "backends.layers",
        "the traits of a backend's spec are those of the layers that the live backend supports",
        "Return None from AttentionBackend.supports for exactly the layers whose traits BackendSpec.traits has.",
        _POOL,
    ),
    _device_check(
        "sampler.placement",
        "sample returns int64 [rows] on the platform's device, within the vocabulary, and keeps them",
        "Return one token id per row, as torch.int64, on the device of the logits, in a new tensor at every call.",
    ),
    _device_check(
        "sampler.greedy",
        "temperature 0 takes the largest logit, with and without sampled rows in the batch",
        "Take argmax for rows of temperature 0, whatever the other rows are.",
        (*_STARTED, "sampler.placement"),
    ),
    _device_check(
        "sampler.distribution",
        "with the engine's noise, token frequencies match the probabilities (chi-squared)",
        "Draw the first kept token whose cumulative probability exceeds SamplingBatch.uniform, summed in float64.",
        (*_STARTED, "sampler.placement"),
    ),
    _device_check(
        "sampler.exact",
        "each token is drawn for one interval of SamplingBatch.uniform, whose length is its probability",
        "Use SamplingBatch.uniform and no other noise; sum probabilities in float64, in a fixed order of tokens.",
        _SAMPLER,
    ),
    _device_check(
        "sampler.top_k",
        "top-k keeps the k most likely tokens",
        "Keep SamplingBatch.top_k tokens of each row; a top_k equal to the vocabulary size disables the filter.",
        (*_SAMPLER, "sampler.exact"),
    ),
    _device_check(
        "sampler.top_p",
        "top-p keeps the smallest set of most likely tokens whose probabilities reach p",
        "Keep a token if the more likely ones do not reach top_p; always keep the most likely one.",
        (*_SAMPLER, "sampler.exact"),
    ),
    _device_check(
        "sampler.min_p",
        "min-p keeps the tokens that are at least p times as likely as the most likely one",
        "Compare each probability with min_p times the largest.",
        (*_SAMPLER, "sampler.exact"),
    ),
    _device_check(
        "sampler.filter_order",
        "temperature, top-k, top-p and min-p are applied in this order",
        "Renormalise after top-k and before top-p, and compare min-p with the largest probability.",
        (*_SAMPLER, "sampler.exact", "sampler.top_k", "sampler.top_p", "sampler.min_p"),
    ),
    _device_check(
        "sampler.extremes",
        "a token of probability 0 is never drawn, whatever the noise",
        "Clamp the noise below the total probability, so that rounding cannot lead past the last kept token.",
        (*_SAMPLER, "sampler.exact", "sampler.top_k", "sampler.top_p", "sampler.min_p"),
    ),
    _device_check(
        "sampler.batch",
        "a row's token depends only on that row",
        "Sum each row in one fixed order, independent of the other rows and their filters.",
        (*_SAMPLER, "sampler.exact", "sampler.greedy"),
    ),
    _device_check(
        "graph.declared",
        "the capability graphs is declared if and only if Platform.graphs is implemented",
        "Declare graphs if the platform can replay captured steps; otherwise Platform.graphs is None.",
        (*_POOL, "pool.page_zero", "pool.cache_specs"),
    ),
    Check(
        "platform.communicator",
        Level.L1,
        "the operations of two ranks in two processes have the right results, and a rank that stays away is an error",
        "ranks:communicator",
        "See srv.platform.interface.Communicator for what each operation returns and raises.",
        needs="communicator",
        after=(*_POOL, "graph.declared"),
        seconds=300.0,
    ),
)

_ATTENTION = (*_POOL, "pool.page_zero", "pool.cache_specs", "attention.placement", "attention.single_page")
_PAGED = (*_ATTENTION, "attention.several_pages", "attention.page_boundaries")
_OPS = (*_STARTED, "op.coverage", "op.placement")


def _reference_check(
    name: str, summary: str, remedy: str, after: tuple[str, ...], needs: str = "", module: str = "attention"
) -> Check:
    target = f"{module}:{name.partition('.')[2]}"
    return Check(name, Level.L2, summary, target, remedy, needs=needs, after=after, seconds=300.0)


def _op_check(name: str, summary: str, remedy: str, after: tuple[str, ...] = _OPS, needs: str = "") -> Check:
    return _reference_check(f"op.{name}", summary, remedy, after, needs, module="ops")


_COMPARE_OP = "Compare with the op's float64 oracle in srv_kernels.oracles for the inputs in the message."

L2 = (
    _op_check(
        "coverage",
        "every op that models need has an implementation in each declared dtype",
        "Add an OpImpl for it; the plain torch functions of srv_kernels.reference may be its target.",
        _STARTED,
    ),
    _op_check(
        "placement",
        "ops return tensors on the platform's device",
        "Allocate results on the device of the arguments.",
        (*_STARTED, "op.coverage"),
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
    _op_check("others", "every other op of the plugin satisfies its contract", _COMPARE_OP),
    _reference_check(
        "attention.placement",
        "attention returns a tensor of q's shape and dtype on the platform's device",
        "Return [tokens, heads, head_dim] of q's dtype, on q's device.",
        _POOL,
    ),
    _reference_check(
        "attention.single_page",
        "attention is correct for rows that fit in one page",
        "Compare one row with srv.models.transformers.hf_check.dense_attention, first a prompt, then its next token.",
        (*_POOL, "pool.page_zero", "pool.cache_specs", "attention.placement"),
    ),
    _reference_check(
        "attention.several_pages",
        "attention is correct for rows of several pages, anywhere in the pool",
        "Token t of row i lies in page page_table[i, t // page_size], at t % page_size.",
        _ATTENTION,
    ),
    _reference_check(
        "attention.page_boundaries",
        "attention is correct for rows that end before, at and after a page boundary",
        "A row of kv_len tokens has ceil(kv_len / page_size) pages; check how many of them are read and written.",
        (*_ATTENTION, "attention.several_pages"),
    ),
    _reference_check(
        "attention.gqa",
        "attention is correct if query heads share KV heads",
        "Query heads h * n to h * n + n - 1 read KV head h, with n = heads / kv_heads.",
        _PAGED,
    ),
    _reference_check(
        "attention.mixed",
        "attention is correct for prompts and output tokens in one step",
        "Rows follow each other along the token axis, with query_lens[i] tokens each.",
        _PAGED,
    ),
    _reference_check(
        "attention.extend",
        "attention is correct for prompts that are computed in chunks",
        "The first query of row i has position kv_lens[i] - query_lens[i]; it attends to itself and all tokens "
        "before it.",
        _PAGED,
        "chunked_prefill",
    ),
    _reference_check(
        "attention.sharing",
        "attention is correct for rows that share their first pages",
        "Read pages through the row's own page table; write only the tokens of the step.",
        (*_PAGED, "attention.mixed", "attention.extend"),
        "prefix_cache",
    ),
    _reference_check(
        "attention.same_step",
        "attention is correct for rows that share pages that the same step writes",
        "Write the keys and values of all rows before any row attends; the rows of a captured step with drafts are the "
        "tokens of a few sequences.",
        _PAGED,
    ),
    _reference_check(
        "attention.layers",
        "each layer has its own keys and values",
        "AttentionLayer.index is the index of the layer's tensors in the pool.",
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
        _PAGED,
    ),
    _reference_check(
        "attention.window_pages",
        "what the pages behind a sliding window hold does not change the result",
        "These pages are freed and may belong to other requests; do not read them, or select with torch.where instead "
        "of multiplying by a weight of 0, which keeps NaN.",
        (*_PAGED, "attention.extend", "attention.window"),
    ),
    _reference_check(
        "attention.soft_cap",
        "attention is correct with capped scores, also in a sliding window, if the backend accepts such models",
        "Scores become soft_cap * tanh(scores / soft_cap) before masking; if the kernels do not support this, "
        "remove the trait from BackendSpec.traits.",
        (*_PAGED, "attention.window"),
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
)

# The graph checks compute prompts eagerly, in two layers, with page tables wider than a row: these checks come first.
_CAPTURED = (*_PAGED, "attention.layers", "attention.unused_columns", "graph.declared")


def _graph_check(name: str, summary: str, remedy: str, after: tuple[str, ...] = (*_CAPTURED, "graph.replay")) -> Check:
    return _reference_check(f"graph.{name}", summary, remedy, after, "graphs", module="graphs")


_STATIC_BUFFERS = (
    "Tensors that a captured kernel reads must keep their addresses: `plan` copies into those of AttentionBatch.graph."
)
GRAPHS = (
    _graph_check(
        "replay", "a captured step is correct when it is replayed with new inputs", _STATIC_BUFFERS, _CAPTURED
    ),
    _graph_check(
        "lengths",
        "a replay uses the lengths and pages of its own step, not those of the capture",
        "Apply the host lengths of `metadata` in Graphs.replay, or keep them in device tensors that `plan` rewrites.",
    ),
    _graph_check(
        "padding",
        "padded rows of a captured step do not change the others",
        "Padded rows have only page 0 and a length of 1; they may write only to page 0.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
    ),
    _graph_check(
        "row_counts",
        "captured steps with different row counts can be replayed alternately",
        "Store the state of a captured step by its key.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
    ),
    _graph_check(
        "back_to_back",
        "a replay may be launched while the previous one of the same captured step runs",
        "In Graphs.replay, wait for the previous replay if its inputs would be overwritten.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
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

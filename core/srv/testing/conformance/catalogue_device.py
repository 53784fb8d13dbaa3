"""Checks of levels 1 and 2, in the order in which they run: laws of any device, then references. Torch-free."""

from __future__ import annotations

from srv.testing.conformance.model import Check, Level

_STARTED = ("platform.starts", "platform.patches", "platform.device")
_POOL = (*_STARTED, "pool.shapes", "pool.placement")
_SAMPLER = (*_STARTED, "sampler.placement", "sampler.bias")


def _law(name: str, summary: str, remedy: str, after: tuple[str, ...] = _STARTED, needs: str = "") -> Check:
    target = name.replace(".", ":").replace("graph:", "graphs:")
    return Check(name, Level.L1, summary, target, remedy, needs=needs, after=after, seconds=120.0)


L1 = (
    _law(
        "platform.starts",
        "create gives a platform that keeps the contract, and init_worker makes it ready",
        "Run `srv doctor`; implement every member of srv.platform.interface.Platform, and no other public one.",
        (),
    ),
    _law(
        "platform.patches",
        "create changes nothing of srv",
        "Extend srv through the platform object; assign nothing to its modules or classes.",
        ("platform.starts",),
    ),
    _law(
        "platform.device",
        "device(0) holds tensors, computes on them, and results stay there",
        "Return the torch.device that this rank's tensors live on.",
        ("platform.starts", "platform.patches"),
    ),
    _law(
        "platform.memory",
        "0 <= free <= total, and a total like the probe's",
        "Return bytes of the one device, as its driver reports them, in ProbeResult and in memory().",
    ),
    _law(
        "platform.events",
        "what was enqueued before an event is done when the event was waited for",
        "Record the event on the stream that torch's operators and copies use.",
    ),
    _law(
        "platform.diagnose",
        "diagnose gives checks, and says what to do about those that are not well",
        "Return a list of srv.platform.interface.Check with name and detail, and a remedy where ok is False.",
    ),
    _law(
        "pool.shapes",
        "kv_buffers gives a key and a value buffer a layer, with pages + 1 pages, as the layout says",
        "Allocate pages + 1 pages of layout.page_size tokens for each of layout.group.layers, of layout.dtype.",
    ),
    _law(
        "pool.placement",
        "every buffer of the pool is on the platform's device",
        "Allocate with device=self.device(local_rank).",
        (*_STARTED, "pool.shapes"),
    ),
    _law(
        "pool.page_zero",
        "a new pool is finite, page 0 with it",
        "Zero the pool, or leave out only what attention never reads.",
        _POOL,
    ),
    _law(
        "pool.separate",
        "no two buffers of a pool share memory",
        "Allocate a buffer for the keys and one for the values of each layer.",
        _POOL,
    ),
    _law(
        "pool.allocator",
        "a pool that is dropped gives its memory back, or to the next pool",
        "Keep no reference to buffers that kv_buffers returned.",
        (*_POOL, "platform.memory"),
    ),
    _law(
        "pool.accounting",
        "memory() sees what a pool takes",
        "Return what the driver says is free now, not what was free at the start.",
        (*_POOL, "platform.memory"),
    ),
    _law(
        "sampler.placement",
        "sample gives int64 [rows] on the platform's device, within the vocabulary",
        "Return one token id a row, as torch.int64, on the device of the logits.",
    ),
    _law(
        "sampler.greedy",
        "temperature 0 takes the largest logit, alone and beside rows that are drawn",
        "Take argmax for rows of temperature 0, whatever the other rows are.",
        (*_STARTED, "sampler.placement"),
    ),
    _law(
        "sampler.bias",
        "over the engine's noise, tokens come as often as they are probable (chi-squared)",
        "Draw the first kept token whose cumulative probability exceeds SamplingBatch.uniform, summed in float64.",
        (*_STARTED, "sampler.placement"),
    ),
    _law(
        "sampler.exact",
        "each token is drawn for one stretch of the noise, as long as it is probable",
        "Use SamplingBatch.uniform and no other noise; sum probabilities in float64, in a fixed order of tokens.",
        _SAMPLER,
    ),
    _law(
        "sampler.top_k",
        "top-k keeps the k most likely tokens",
        "Keep SamplingBatch.top_k tokens of each row; the vocabulary's size keeps all.",
        (*_SAMPLER, "sampler.exact"),
    ),
    _law(
        "sampler.top_p",
        "top-p keeps the smallest set of likely tokens that reaches p",
        "Keep a token if those more likely than it do not reach top_p; the most likely one always stays.",
        (*_SAMPLER, "sampler.exact"),
    ),
    _law(
        "sampler.min_p",
        "min-p keeps what is at least p times as likely as the most likely token",
        "Compare each probability with min_p times the largest.",
        (*_SAMPLER, "sampler.exact"),
    ),
    _law(
        "sampler.together",
        "temperature, top-k, top-p and min-p apply in this order, each on what the one before has left",
        "Renormalise before top-p what top-k has left, and compare min-p with the largest of it.",
        (*_SAMPLER, "sampler.exact", "sampler.top_k", "sampler.top_p", "sampler.min_p"),
    ),
    _law(
        "sampler.extremes",
        "a token of probability 0 never comes, whatever the noise",
        "Keep the noise below the total, so that rounding cannot lead past the last kept token.",
        (*_SAMPLER, "sampler.exact", "sampler.top_k", "sampler.top_p", "sampler.min_p"),
    ),
    _law(
        "sampler.batch",
        "a row's token depends on that row alone",
        "Sum each row in one fixed order, whatever other rows there are and whatever filters they want.",
        (*_SAMPLER, "sampler.exact", "sampler.greedy"),
    ),
    _law(
        "graph.declared",
        "the capability graphs and Platform.graphs say the same",
        "Declare graphs if the platform can replay captured steps, and give None otherwise.",
        (*_POOL, "pool.page_zero", "pool.separate"),
    ),
)

_ATTENTION = (*_POOL, "pool.page_zero", "pool.separate", "attention.placement", "attention.single_page")
_PAGED = (*_ATTENTION, "attention.several_pages", "attention.page_borders")
_OPS = (*_STARTED, "op.coverage", "op.placement")


def _against_reference(
    name: str, summary: str, remedy: str, after: tuple[str, ...], needs: str = "", module: str = "attention"
) -> Check:
    target = f"{module}:{name.partition('.')[2]}"
    return Check(name, Level.L2, summary, target, remedy, needs=needs, after=after, seconds=300.0)


def _op(name: str, summary: str, remedy: str, after: tuple[str, ...] = _OPS, needs: str = "") -> Check:
    return _against_reference(f"op.{name}", summary, remedy, after, needs, module="ops")


_RIGHT_OP = "Compare with the float64 oracle of the op in srv_kernels.oracles on the inputs that the message names."

L2 = (
    _op(
        "coverage",
        "every op that models need has an implementation in each declared dtype",
        "Add an OpImpl for it; the plain torch functions of srv_kernels.reference may be its target.",
        _STARTED,
    ),
    _op(
        "placement",
        "ops give tensors on the platform's device",
        "Allocate results on the device of the arguments.",
        (*_STARTED, "op.coverage"),
    ),
    _op("rms_norm", "rms_norm keeps its contract, in every dtype that it takes", _RIGHT_OP),
    _op("add_rms_norm", "add_rms_norm keeps its contract, in every dtype that it takes", _RIGHT_OP),
    _op("rotary", "rotary keeps its contract, in every dtype that it takes", _RIGHT_OP),
    _op("silu_and_mul", "silu_and_mul keeps its contract, in every dtype that it takes", _RIGHT_OP),
    _op("linear_w8a8", "linear_w8a8 keeps its contract, in every dtype that it takes", _RIGHT_OP, needs="w8a8"),
    _op(
        "linear_w8a8_static",
        "linear_w8a8_static keeps its contract, in every dtype that it takes",
        _RIGHT_OP,
        needs="w8a8",
    ),
    _op("linear_int8", "linear_int8 keeps its contract, in every dtype that it takes", _RIGHT_OP, needs="int8_weights"),
    _op("linear_gguf", "linear_gguf keeps its contract, in every dtype that it takes", _RIGHT_OP, needs="gguf_blocks"),
    _op("rows_gguf", "rows_gguf keeps its contract, in every dtype that it takes", _RIGHT_OP, needs="gguf_blocks"),
    _op("others", "every further op that the plugin brings keeps its contract", _RIGHT_OP),
    _against_reference(
        "attention.placement",
        "attention gives a tensor like q: its shape and dtype, on the platform's device",
        "Return [tokens, heads, head_dim] of q's dtype, on q's device.",
        _POOL,
    ),
    _against_reference(
        "attention.single_page",
        "attention is right for rows that fit one page",
        "Compare one row with srv.models.transformers.hf_check.dense_attention, first a prompt, then its next token.",
        (*_POOL, "pool.page_zero", "pool.separate", "attention.placement"),
    ),
    _against_reference(
        "attention.several_pages",
        "attention is right for rows of several pages, anywhere in the pool",
        "Token t of row i lies in page page_table[i, t // page_size], at t % page_size.",
        _ATTENTION,
    ),
    _against_reference(
        "attention.page_borders",
        "attention is right for rows that end before, on and after the end of a page",
        "A row of kv_len tokens has ceil(kv_len / page_size) pages; look at how many of them are read and written.",
        (*_ATTENTION, "attention.several_pages"),
    ),
    _against_reference(
        "attention.gqa",
        "attention is right where query heads share KV heads",
        "Query heads h * n to h * n + n - 1 read KV head h, with n = heads / kv_heads.",
        _PAGED,
    ),
    _against_reference(
        "attention.mixed",
        "attention is right with prompts and output in one step",
        "Rows lie one after the other in the token axis, query_lens[i] tokens each.",
        _PAGED,
    ),
    _against_reference(
        "attention.extend",
        "attention is right for prompts that are computed in chunks",
        "The first query of row i has position kv_lens[i] - query_lens[i]; it sees all tokens before it.",
        _PAGED,
        "chunked_prefill",
    ),
    _against_reference(
        "attention.sharing",
        "attention is right for rows that share their first pages",
        "Read pages through the row's own page table; write nothing but the step's own tokens.",
        (*_PAGED, "attention.mixed", "attention.extend"),
        "prefix_cache",
    ),
    _against_reference(
        "attention.layers",
        "layers keep their keys and values apart",
        "AttentionLayer.index says which buffers of the pool are the layer's.",
        _PAGED,
    ),
    _against_reference(
        "attention.unused_columns",
        "attention is right with a page table that is wider than any row",
        "Read as many columns of a row as its kv_len says, not as many as there are.",
        _PAGED,
    ),
    _against_reference(
        "attention.window",
        "attention is right in layers with a window, where the backend accepts such models",
        "A token sees itself and the window - 1 before it; refuse such models in BackendSpec.check otherwise.",
        _PAGED,
    ),
    _against_reference(
        "attention.soft_cap",
        "attention is right with capped scores, where the backend accepts such models",
        "Scores become soft_cap * tanh(scores / soft_cap) before the mask; refuse such models otherwise.",
        _PAGED,
    ),
    _against_reference(
        "attention.dtypes",
        "attention is right in every dtype that is declared and accepted",
        "Let BackendSpec.check answer Unfit for a dtype that the kernels do not take.",
        _PAGED,
    ),
    _against_reference(
        "attention.int8_kv",
        "attention over a pool of 8-bit integers is right, each token's scaled by its head",
        "Round each token's key and value of a head to steps of 1/127 of their largest magnitude; see KVLayout.",
        (*_PAGED, "attention.gqa", "attention.dtypes"),
        "int8_kv",
    ),
    _against_reference(
        "attention.head_dims",
        "attention is right for every head size that a backend accepts",
        "Let BackendSpec.check answer Unfit for head sizes that the kernels do not take.",
        (*_PAGED, "attention.gqa", "attention.dtypes"),
    ),
    _against_reference(
        "attention.undeclared",
        "nothing works that is not declared",
        "Declare the dtype, or let BackendSpec.check refuse it.",
        _PAGED,
    ),
)

# Histories are computed eagerly, in two layers, over page tables wider than a row.
_CAPTURED = (*_PAGED, "attention.layers", "attention.unused_columns", "graph.declared")


def _graph(name: str, summary: str, remedy: str, after: tuple[str, ...] = (*_CAPTURED, "graph.replay")) -> Check:
    return _against_reference(f"graph.{name}", summary, remedy, after, "graphs", module="graphs")


_STATIC = (
    "What a captured kernel reads must stay where it is: `plan` copies into it for one value of AttentionBatch.graph."
)
GRAPHS = (
    _graph("replay", "a captured step replayed with new inputs is right", _STATIC, _CAPTURED),
    _graph(
        "lengths",
        "a replay uses the lengths and pages of its own step, not those of the capture",
        "Apply the host lengths of `metadata` in Graphs.replay, or keep them in device tensors that `plan` rewrites.",
    ),
    _graph(
        "padding",
        "rows of a captured step that have no request change nothing of the others",
        "Rows without a request have page 0 alone and a length of 1; they may write to page 0 only.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
    ),
    _graph(
        "counts",
        "captured steps of several row counts are replayed in turn",
        "Keep what belongs to a captured step by its key.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
    ),
    _graph(
        "unwaited",
        "a replay may be asked for while the last one of the same captured step runs",
        "Wait in Graphs.replay for the last replay, where what it reads would be changed under it.",
        (*_CAPTURED, "graph.replay", "graph.lengths"),
    ),
)

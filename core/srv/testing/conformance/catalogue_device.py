"""Checks of level 1, rules that hold on any device, in the order in which they run. Torch-free."""

from __future__ import annotations

from srv.testing.conformance.model import Check, Level

DEVICE = ("platform.starts", "platform.patches", "platform.device")
STARTED = (*DEVICE, "copies.staging", "platform.events")
POOL = (*STARTED, "pool.shapes", "pool.placement")
_SAMPLER = (*STARTED, "sampler.placement", "sampler.distribution")


def _device_check(name: str, summary: str, remedy: str, after: tuple[str, ...] = STARTED, needs: str = "") -> Check:
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
        "0 <= free <= total, and the total is within a quarter of DeviceFacts.memory_bytes",
        "Return the bytes of one device, as its driver reports them, in ProbeResult and in memory().",
        DEVICE,
    ),
    Check(
        "platform.memory_use",
        Level.L1,
        "memory_use counts what this process allocates and releases, and its peak keeps it until it is reset",
        "memory:use",
        "Return the bytes of tensors that your allocator counts for this process, and its peak since the last reset.",
        needs="memory_use",
        after=DEVICE,
        seconds=120.0,
    ),
    _device_check(
        "copies.staging",
        "staging returns new host memory of the requested shape and dtype at every call",
        "Allocate page-locked host memory at every call: core keeps it, and the device copies from it by itself.",
        DEVICE,
    ),
    _device_check(
        "platform.events",
        "work enqueued before an event is complete after waiting for the event",
        "Return Streams, and record events on the stream that torch's operators and copies use.",
        (*DEVICE, "copies.staging"),
    ),
    _device_check(
        "copies.streams",
        "a stream that waits for an event of another stream sees what was enqueued before the event",
        "Stream.wait delays the stream's later work, and Stream.use makes it this thread's current stream.",
        STARTED,
    ),
    _device_check(
        "copies.ring",
        "steps in flight read and return their own values while staging memory is reused from step to step",
        "A copy with non_blocking=True belongs to the current stream; record events behind everything enqueued there. "
        "A backend copies host values through `context.transfers`.",
        (*STARTED, "copies.streams"),
    ),
    _device_check(
        "platform.diagnose",
        "diagnose returns checks, and every failed one has a remedy",
        "Return a list of srv.platform.interface.Check with name and detail, and a remedy if ok is False.",
        DEVICE,
    ),
    _device_check(
        "pool.shapes",
        "kv_buffers returns a key and a value tensor per layer, with pages + 1 pages, in the given layout",
        "Allocate pages + 1 pages of layout.page_size tokens for each of layout.group.layers, of layout.dtype.",
    ),
    _device_check(
        "pool.placement",
        "every tensor of the pool is on the platform's device",
        "Allocate with device=self.device(context.device_index).",
        (*STARTED, "pool.shapes"),
    ),
    _device_check(
        "pool.page_zero",
        "a new pool is finite, including page 0",
        "Zero the pool; only memory that attention never reads may stay uninitialized.",
        POOL,
    ),
    _device_check(
        "pool.cache_specs",
        "pools of every cache spec have the named tensors of KVLayout, which share no memory, in the budget's sizes",
        "Allocate a tensor per name of layout.names() and layer (srv.platform.pools.plain_pool does), or raise "
        "NotImplementedError for specs that the platform does not support.",
        (*POOL, "pool.page_zero"),
    ),
    _device_check(
        "copies.pages",
        "copy_pages copies whole pages of every layer between device and staging memory, and no others",
        "Copy each (from, to) of `pages` for all layers, keys and values alike, in the current stream: core sets it, "
        "and waits for no other stream.",
        (*POOL, "pool.cache_specs"),
    ),
    _device_check(
        "pool.allocator",
        "the memory of a released pool is freed or reused by the next pool",
        "Keep no reference to tensors that kv_buffers returned.",
        (*POOL, "platform.memory"),
    ),
    _device_check(
        "pool.accounting",
        "memory() accounts for a pool, with as many bytes as it has",
        "Return the bytes that are free now according to the driver, not at start-up, and in no other unit.",
        (*POOL, "platform.memory", "pool.cache_specs"),
    ),
    _device_check(
        "backends.exercised",
        "every attention and sampling backend is exercised; otherwise the check is skipped and names the others",
        "Let the backend fit one of the kit's small models, or test it in the plugin's own tests.",
        STARTED,
    ),
    _device_check(
        "backends.layers",
        "the traits of a backend's spec are those of the layers that the live backend supports",
        "Return None from AttentionBackend.supports for exactly the layers whose traits BackendSpec.traits has.",
        POOL,
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
        (*STARTED, "sampler.placement"),
    ),
    _device_check(
        "sampler.distribution",
        "with the engine's noise, token frequencies match the probabilities (chi-squared)",
        "Draw the first kept token whose cumulative probability exceeds SamplingBatch.uniform, summed in float64.",
        (*STARTED, "sampler.placement"),
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
        (*POOL, "pool.page_zero", "pool.cache_specs"),
    ),
    Check(
        "platform.communicator",
        Level.L1,
        "the operations of three ranks have the right results, and a rank that stays away is an error",
        "ranks:communicator",
        "See srv.platform.interface.Communicator for what each operation returns and raises.",
        needs="communicator",
        after=(*POOL, "graph.declared"),
        seconds=300.0,
    ),
    # The last of its process, whose allocator may keep what it took.
    _device_check(
        "pool.allocatable",
        "four fifths of what memory() says is free can be allocated",
        "Subtract what the driver, the runtime and your allocator keep for themselves: a server takes what is free.",
        (*POOL, "platform.memory", "pool.allocator", "pool.accounting"),
    ),
)

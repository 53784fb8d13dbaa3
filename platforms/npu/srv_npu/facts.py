"""What is known about Ascend NPUs without a device: variants, profiles, capabilities, defaults, backends.

Limits are from the documentation of the fused attention operator (op-plugin, npu_fused_infer_attention_score).
"""

from __future__ import annotations

from srv.args.rules.graphs import default_max_graph_rows
from srv.args.rules.reserve import published_contributions, published_fraction
from srv.args.rules.speculative import draft_tree_constraint
from srv.dist.mesh import mesh_of
from srv.models import derive
from srv.models.facts.sharding import rank_facts
from srv.models.facts.special_layers import mixture
from srv.models.families.trees import native_tree_of_model
from srv.platform.experts import TORCH_EXPERTS
from srv.platform.facts import BackendSpec, Default, DeviceFacts, PlatformFacts, Requires, ResolutionContext, Unfit
from srv.specs import ModelFacts, attention_specs
from srv_npu import limits
from srv_npu.op_specs import ASCEND, MAX_LISTED, OPS
from srv_npu.support import SUPPORT

VARIANTS = ("a2", "a3")

_GIB = 1 << 30

PROFILES = {
    "a2": DeviceFacts("a2", 64 * _GIB, 1, "Ascend 910B, Atlas 800I A2"),
    "a2-32gb": DeviceFacts("a2", 32 * _GIB, 1, "Ascend 910B4, 32 GB"),
    "a3": DeviceFacts("a3", 64 * _GIB, 1, "Ascend 910_93, one die of Atlas 800I A3"),
}

CARDS = {
    "910b": PROFILES["a2"],
    "910b4": PROFILES["a2-32gb"],
    "800i-a2": PROFILES["a2"],
    "910c": PROFILES["a3"],
    "800i-a3": PROFILES["a3"],
}


def capabilities(device: DeviceFacts) -> frozenset[str]:
    """No float32, since attention computes in 16 bits. Graphs are ACL graphs; each replay updates their lengths."""
    return frozenset(
        {
            "paged_kv",
            "prefix_cache",
            "chunked_prefill",
            "overlap",
            "graphs",
            "communicator",
            "reduce_scatter",
            "all_to_all",
            "broadcast",
            "send_recv",
            "memory_use",
            "profiler_ranges",
            "w8a8",
            "float16",
            "bfloat16",
        }
    )


def _chunked_prefill_size(context: ResolutionContext) -> int | None:
    memory = context.device.memory_bytes
    if memory <= 32 * _GIB:
        return 4096
    return 8192 if memory <= 64 * _GIB else None


def _ascend_experts(context: ResolutionContext) -> Requires | Unfit:
    """npu_grouped_matmul takes experts of any shape up to its limits, which the ops check.

    Their biases are operands of their own, of which a call takes a limited number.
    """
    moe = None if context.model is None else mixture(context.model, {})
    if moe is None or not moe.experts.bias or moe.experts.count <= MAX_LISTED:
        return Requires()
    return Unfit((f"it takes at most {MAX_LISTED} experts with biases, and the model has {moe.experts.count}",))


def _ascend(context: ResolutionContext) -> Requires | Unfit:
    """128 tokens is the only page size that prefill, decode and decode in graphs all support."""
    reasons = _dtype_reasons(context)
    if context.model is not None:
        reasons += [*_head_reasons(context), *_row_reasons(context, context.model)]
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": (limits.PAGE,)})


def _dtype_reasons(context: ResolutionContext) -> list[str]:
    """Queries, keys and values share one 16-bit dtype."""
    dtype, kv_dtype = (None if context[name] == "auto" else context[name] for name in ("dtype", "kv_cache_dtype"))
    reasons = [] if dtype in (None, *limits.DTYPES) else [f"dtype {dtype} is not one of {', '.join(limits.DTYPES)}"]
    if dtype is None and context.model is not None:
        dtype = context.model.dtype if context.model.dtype in limits.DTYPES else limits.DTYPES[0]
    if None not in (dtype, kv_dtype) and kv_dtype != dtype:
        reasons.append(f"kv_cache_dtype {kv_dtype} is not the model's dtype, {dtype}")
    return reasons


def _head_reasons(context: ResolutionContext) -> list[str]:
    """Why one rank's heads cannot be computed."""
    assert context.model is not None
    model = rank_facts(context.model, mesh_of(context.__getitem__).width("heads"))
    if model.latents:
        return _latent_reasons(model)
    reasons = limits.head_reasons(model.heads, model.kv_heads, model.head_dim)
    supported = " or ".join(f"{key} with {value}" for key, value in limits.PACKED_DIMS if key != value)
    reasons += [
        f"keys of {group.key_dim} and values of {group.value_dim} elements differ in length; only {supported} may"
        for group in attention_specs(model.cache_groups)
        if group.key_dim != group.value_dim and (group.key_dim, group.value_dim) not in limits.PACKED_DIMS
    ]
    reasons += [
        limits.window_reason(group.window, group.key_dim, group.value_dim)
        for group in attention_specs(model.cache_groups)
        if group.window is not None and group.key_dim != group.value_dim
    ]
    return reasons


def _latent_reasons(model: ModelFacts) -> list[str]:
    """Of native layers, since no others cache compressed vectors. `model`: as one rank sees it."""
    native = native_tree_of_model(model)
    layers = () if isinstance(native, str) else derive.attention_layers(native)
    sizes = dict.fromkeys(layer.latent for layer in layers if layer.latent is not None)
    return [reason for dims in sizes for reason in limits.latent_reasons(model.heads, dims)]


def _row_reasons(context: ResolutionContext, model: ModelFacts) -> list[str]:
    """If key and value dims differ, or attention is latent, calls are packed, and take a limited number of rows."""
    running = context["max_running_requests"]
    if running is None or running <= limits.PACKED_ROWS:
        return []
    if model.latents:
        return [
            f"max_running_requests {running} is more than the {limits.PACKED_ROWS} rows that one call takes for latent "
            "attention"
        ]
    return [
        f"max_running_requests {running} is more than the {limits.PACKED_ROWS} rows that one call takes for keys of "
        f"{group.key_dim} and values of {group.value_dim} elements"
        for group in attention_specs(model.cache_groups)
        if (group.key_dim, group.value_dim) in limits.PACKED_DIMS and group.key_dim != group.value_dim
    ]


def _sampling(context: ResolutionContext) -> Requires:
    return Requires()


def _graph_rows(context: ResolutionContext) -> int:
    memory, wide = context.device.memory_bytes, context["tp_size"] >= 4
    if memory <= 32 * _GIB:
        return 64 if wide else 16
    return (256 if wide else 64) if memory <= 64 * _GIB else default_max_graph_rows(context)


def _graph_batch(context: ResolutionContext) -> int | None:
    return None if context["disable_graphs"] or context["graph_batch_sizes"] else _graph_rows(context)


DEFAULTS = (
    Default(
        "chunked_prefill_size",
        _chunked_prefill_size,
        "cards of up to 32 GiB have memory for chunks of 4096 tokens, cards of up to 64 GiB for 8192",
    ),
    Default(
        "graph_max_batch_size",
        _graph_batch,
        "larger graphs do not fit into cards of up to 32 or 64 GiB; with tp_size 4 or more they may be larger",
        reads=("disable_graphs", "graph_batch_sizes", "tp_size"),
    ),
    published_fraction(),
)

BACKENDS = {
    "attention": (
        BackendSpec(
            name="ascend",
            priority=10,
            check=_ascend,
            target="srv_npu.attention:AscendAttention",
            kv_order=limits.KV_ORDER,
            graphs=True,
            traits=limits.TRAITS,
            latent="srv_npu.latent_attention:AscendLatentAttention",
        ),
    ),
    "sampling": (
        BackendSpec(
            name="pytorch",
            priority=10,
            check=_sampling,
            target="srv_npu.sampling:TorchSampling",
        ),
        BackendSpec(
            name="ascend",
            priority=5,
            check=_sampling,
            target="srv_npu.sampling:AscendSampling",
        ),
    ),
    "moe": (BackendSpec(name=ASCEND, priority=10, check=_ascend_experts, target="", graphs=True), TORCH_EXPERTS),
}

FACTS = PlatformFacts(
    capabilities,
    PROFILES,
    defaults=DEFAULTS,
    contributions=published_contributions(_graph_rows),
    constraints=(draft_tree_constraint(),),
    backends=BACKENDS,
    support=SUPPORT,
    ops=OPS,
    cards=CARDS,
)

"""What is known about the toy platform without its device: variant, capabilities, backends. Imports no torch."""

from __future__ import annotations

from srv.platform.experts import EXPERTS, INT8, TORCH_EXPERTS, torch_expert_ops
from srv.platform.facts import (
    BackendSpec,
    Contribution,
    Default,
    DeviceFacts,
    OpCall,
    OpSpec,
    PlatformFacts,
    Requires,
    ResolutionContext,
    Unfit,
)
from srv.specs import attention_specs
from srv_toy_device.limits import TRAITS, attention_bytes, sampling_bytes

VARIANT = "toy1"
DEVICE_NAME = "toy accelerator (simulated)"
MEMORY = 2 << 30  # bytes

# The KV pool's axes that `toy_paged` reads: [pages + 1, page_size, kv_heads, head_dim].
KV_ORDER = "page_token_head"

# The names are defined by core; srv.platform.capabilities says what each one promises.
_CAPABILITIES = frozenset(
    {
        *("paged_kv", "prefix_cache", "chunked_prefill", "overlap", "graphs", "piecewise_graphs", "w8a8"),
        *("communicator", "reduce_scatter", "all_to_all", "broadcast", "send_recv"),
        "memory_use",
        *("float32", "float16", "bfloat16"),
    }
)


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return _CAPABILITIES


def check_attention(context: ResolutionContext) -> Requires | Unfit:
    """Any page size, window and head dim, with key and value dims that are equal."""
    reasons = [
        f"keys of {group.key_dim} and values of {group.value_dim} elements differ in length"
        for group in (attention_specs(context.model.cache_groups) if context.model else ())
        if group.key_dim != group.value_dim
    ]
    return Unfit(tuple(reasons)) if reasons else Requires()


def check_sampling(context: ResolutionContext) -> Requires | Unfit:
    return Requires()


def dtype(context: ResolutionContext) -> str | None:
    return "float32" if context.model is not None and context.model.dtype == "float16" else None


def workspace(context: ResolutionContext) -> float:
    return 0 if context.model is None else attention_bytes(context.model) + sampling_bytes(context.model)


def check_op(device: DeviceFacts, call: OpCall) -> str | None:
    dtypes = ("float32", "float16", "bfloat16")
    return None if call.dtype in dtypes else f"{call.dtype} is not one of {', '.join(dtypes)}"


# The reference functions use only PyTorch operators, and the device has all of those.
_OPS = ("rms_norm", "add_rms_norm", "rotary", "silu_and_mul", "linear_w8a8", "linear_w8a8_static")
_RECURRENT_OPS = (
    "causal_conv1d",
    "gated_delta_rule",
    "gated_linear_recurrence",
    "selective_scan",
    "state_space_scan",
)
OPS = (
    *(OpSpec(op, "reference", check_op, f"srv_kernels.reference:{op}") for op in _OPS),
    *(OpSpec(op, "reference", check_op, f"srv_kernels.recurrent_reference:{op}") for op in _RECURRENT_OPS),
    *torch_expert_ops(check_op, (EXPERTS, INT8)),
)

FACTS = PlatformFacts(
    capabilities=capabilities,
    defaults=(Default("dtype", dtype, "the device runs the host's kernels, and few hosts are fast in float16"),),
    contributions=(
        Contribution(
            "reserved_memory",
            "workspace",
            workspace,
            "attention gathers pages and computes scores, and sampling sorts in float64",
        ),
    ),
    profiles={VARIANT: DeviceFacts(variant=VARIANT, memory_bytes=MEMORY, count=1, name=DEVICE_NAME)},
    backends={
        "attention": (
            BackendSpec(
                name="toy_paged",
                priority=10,
                check=check_attention,
                target="srv_toy_device.attention:ToyPagedAttention",
                kv_order=KV_ORDER,
                graphs=True,
                traits=TRAITS,
            ),
        ),
        "sampling": (
            BackendSpec(
                name="toy_sampling",
                priority=10,
                check=check_sampling,
                target="srv_toy_device.sampling:ToySampling",
            ),
        ),
        "moe": (TORCH_EXPERTS,),
    },
    ops=OPS,
)

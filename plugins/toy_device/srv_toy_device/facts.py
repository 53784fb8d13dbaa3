"""What the toy platform says without its device: one variant, its capabilities, its backends. Torch-free."""

from __future__ import annotations

from srv.platform.facts import BackendSpec, Contribution, Default, DeviceFacts, PlatformFacts, Requires, Seen, Unfit
from srv_toy_device.limits import attention_bytes, sampling_bytes
from srv_toy_device.settings import DEFAULT_MEMORY

VARIANT = "toy1"
DEVICE_NAME = "toy accelerator (simulated)"

# The KV pool's axes that `toy_paged` reads: [pages + 1, page_size, kv_heads, head_dim].
KV_ORDER = "page_token_head"

# The words are core's; srv.platform.capabilities says what each promises.
_CAPABILITIES = frozenset(
    {"paged_kv", "prefix_cache", "chunked_prefill", "overlap", "graphs", "w8a8", "float32", "float16", "bfloat16"}
)


def capabilities(device: DeviceFacts) -> frozenset[str]:
    return _CAPABILITIES


def check_attention(seen: Seen) -> Requires | Unfit:
    """Any page size and head size; one pool of full attention, with keys as long as values."""
    reasons = []
    for group in seen.model.cache_groups if seen.model else ():
        if group.kind != "full":
            reasons.append(f"cache group of kind {group.kind!r} is not full attention")
        if group.key_dim != group.value_dim:
            reasons.append(f"keys of {group.key_dim} and values of {group.value_dim} elements differ in length")
    return Unfit(tuple(reasons)) if reasons else Requires()


def check_sampling(seen: Seen) -> Requires | Unfit:
    return Requires()


def dtype(seen: Seen) -> str | None:
    return "float32" if seen.model is not None and seen.model.dtype == "float16" else None


def workspace(seen: Seen) -> float:
    return 0 if seen.model is None else attention_bytes(seen.model) + sampling_bytes(seen.model)


FACTS = PlatformFacts(
    capabilities=capabilities,
    defaults=(Default("dtype", dtype, "the host's kernels do the work, and few hosts are fast in float16"),),
    contributions=(
        Contribution(
            "reserved_memory",
            "workspace",
            workspace,
            "attention gathers pages and holds scores, and sampling sorts in float64",
        ),
    ),
    profiles={VARIANT: DeviceFacts(variant=VARIANT, memory_bytes=DEFAULT_MEMORY, count=1, name=DEVICE_NAME)},
    backends={
        "attention": (
            BackendSpec(
                name="toy_paged",
                priority=10,
                check=check_attention,
                target="srv_toy_device.attention:ToyPagedAttention",
                kv_order=KV_ORDER,
                summary="gathers each row's pages, then an explicit softmax in float32",
                graphs=True,
            ),
        ),
        "sampling": (
            BackendSpec(
                name="toy_sampling",
                priority=10,
                check=check_sampling,
                target="srv_toy_device.sampling:ToySampling",
                summary="sorts each row, filters, and inverts the cumulative distribution",
            ),
        ),
    },
)

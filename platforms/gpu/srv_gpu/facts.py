"""What the GPU platforms have in common and is known without a device: capabilities and backend specs. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from srv.dtypes import FLOAT8
from srv.platform.facts import BackendSpec, DeviceFacts, OpCall, Requires, ResolutionContext, Support, Unfit
from srv.specs import LAYER_TRAITS, attention_specs
from srv_kernels.triton.targets import BY_NAME as TARGETS

Check = Callable[[ResolutionContext], Requires | Unfit]

KV_ORDER = "page_token_head"
TRITON_HEAD = 256  # the longest head that Triton's attention computes
TRITON_GROUP = 128  # the most query heads that may share a KV head
TRAITS = ("window", "soft_cap")  # of layers, in the vendors' kernels that are called
TRITON_TRAITS = (*TRAITS, "sinks", "chunks", "temperature")  # in Triton's kernels of paged attention
TORCH_TRAITS = (*TRITON_TRAITS, "alibi", "bidirectional", "relative_bias")  # in attention with torch operators
# Of backends that are never called: their own reasons are given, and not which layers they cannot compute.
_TRAITS_OF_NOT_CALLED = tuple(trait for trait in LAYER_TRAITS if trait != "indexer")
NUM_KV_SPLITS = "triton_attention_num_kv_splits"
SPLIT_TILE_SIZE = "triton_attention_split_tile_size"
ABSORB_PREFILL, WHOLE_PREFIX = "disable_mla_ragged_prefill", "disable_chunked_prefix_cache"
FLASHINFER_HEADS = (64, 128, 256)
AITER_HEADS = (128, 256)  # for which its prefill is compiled
AITER_GROUP = 16
AITER_TRAITS = ("soft_cap",)  # its decode kernel knows no window
HALVES = ("bfloat16", "float16")
_FLOATS = ("float32", *HALVES)
TRITON = "triton"
FLOAT8_TYPES = {"fp8_e4m3": "fp8e4nv", "fp8_e5m2": "fp8e5"}  # Triton's names
MISSING_TRITON = f"the package {TRITON} is not installed"
_NO_SCALES = "it does not read the scales of an int8 KV pool"
_NO_FLOAT8 = "srv gives it no scales of a KV pool of 8-bit floats"
NOT_CALLED = "this version of srv does not call it"

SUPPORT = (
    Support(
        "enable_deterministic_inference",
        "unsupported",
        "matrix products are PyTorch's, whose libraries choose the order of summation by the number of rows",
    ),
)

# What holds for every GPU. Capabilities that need Triton: see `capabilities`.
_CAPABILITIES = frozenset(
    {
        "paged_kv",
        "prefix_cache",
        "chunked_prefill",
        "communicator",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send_recv",
        "memory_use",
        "profiler_ranges",
        "w8a8",
        "int8_weights",
        "fp8_weights",
        "fp8_kv",
        "float32",
        "float16",
    }
)


def has_package(device: DeviceFacts, package: str) -> bool:
    """Whether a package is installed. Device profiles have no package versions, so it is assumed for them."""
    return not device.versions or package in device.versions


def float_reason(device: DeviceFacts, call: OpCall) -> str | None:
    """Why kernels for all floats cannot be called so."""
    return None if call.dtype in _FLOATS else f"{call.dtype} is not one of {', '.join(_FLOATS)}"


def capabilities(device: DeviceFacts) -> set[str]:
    """What every variant has. Weights in GGUF blocks and int8 KV pools need Triton's kernels."""
    return set(_CAPABILITIES) | ({"gguf_blocks", "int8_kv"} if has_package(device, TRITON) else set())


def fits(context: ResolutionContext) -> Requires:
    return Requires()


def _without_scales(context: ResolutionContext) -> Requires | Unfit:
    return Unfit((_no_scales(context),)) if context["kv_cache_dtype"] == "int8" else Requires()


def _no_scales(context: ResolutionContext) -> str:
    """Where Triton's kernels read them, the reason names these."""
    return _NO_SCALES if _caches_latents(context) else f"{_NO_SCALES}; triton does"


def _caches_latents(context: ResolutionContext) -> bool:
    return context.model is not None and bool(context.model.latents)


def _needs(package: str) -> Check:
    def check(context: ResolutionContext) -> Requires | Unfit:
        if has_package(context.device, package):
            return Requires()
        return Unfit((f"the package {package} is not installed",))

    return check


def triton_attention(context: ResolutionContext) -> Requires | Unfit:
    """Pages of any size, heads of up to 256 elements."""
    reasons = [] if has_package(context.device, TRITON) else [MISSING_TRITON]
    model = context.model
    for group in attention_specs(model.cache_groups) if model is not None else ():
        longest = max(group.key_dim, group.value_dim)
        if longest > TRITON_HEAD:
            reasons.append(f"heads have {longest} elements, more than {TRITON_HEAD}")
        if context["kv_cache_dtype"] == "int8" and (group.key_dim % 4 or group.value_dim % 4):
            reasons.append(f"heads of {group.key_dim} and {group.value_dim} elements leave int8 scales unaligned")
        if model is not None and model.heads // group.kv_heads > TRITON_GROUP:
            reasons.append(f"{model.heads // group.kv_heads} query heads share a KV head, more than {TRITON_GROUP}")
    if _caches_latents(context) and context["kv_cache_dtype"] == "int8":
        reasons.append("it does not support int8 pools of latent attention")
    reasons += _float8_reasons(context)
    if _caches_latents(context) and context[SPLIT_TILE_SIZE] is not None:
        reasons.append(f"it does not read {SPLIT_TILE_SIZE} for latent attention")
    return Unfit(tuple(dict.fromkeys(reasons))) if reasons else Requires()


def _float8_reasons(context: ResolutionContext) -> list[str]:
    """Why Triton does not convert the 8-bit floats of a KV pool: not every GPU has both formats."""
    target = TARGETS.get(triton_target(context.device.variant))
    name = FLOAT8_TYPES.get(context["kv_cache_dtype"])
    if name is None or target is None or name in target.float8:
        return []
    return [f"Triton does not convert {context['kv_cache_dtype']} on {target.name}; torch_native does"]


def half_reasons(context: ResolutionContext) -> list[str]:
    """Why kernels for 16-bit queries and a pool of the same dtype cannot be used, as far as dtypes are known."""
    dtype, kv_dtype = (None if context[name] == "auto" else context[name] for name in ("dtype", "kv_cache_dtype"))
    dtype = dtype or (context.model.dtype if context.model is not None else None)
    if dtype not in (None, *HALVES):
        return [f"dtype {dtype} is not one of {', '.join(HALVES)}"]
    if kv_dtype == "int8":
        return [_no_scales(context)]
    if kv_dtype in FLOAT8:
        return [_NO_FLOAT8]
    if kv_dtype in ("float32", *HALVES) and dtype is not None and kv_dtype != dtype:
        return [f"kv_cache_dtype {kv_dtype} is not the activations' dtype, {dtype}"]
    return []


def attention(
    name: str,
    priority: int,
    check: Check,
    target: str,
    *,
    graphs: bool = True,
    lengths: str = "device",
    traits: tuple[str, ...] = TRAITS,
    arguments: tuple[str, ...] = (),
    fallback: bool = False,
    latent: str = "",
) -> BackendSpec:
    """The spec of an attention backend; unless stated otherwise, it computes windows and soft caps."""
    return BackendSpec(
        name,
        priority,
        check,
        target,
        KV_ORDER,
        graphs=graphs,
        lengths=lengths,
        traits=traits,
        arguments=arguments,
        fallback=fallback,
        latent=latent,
    )


def not_called(name: str, priority: int, variants: Sequence[str] = ()) -> BackendSpec:
    """A vendor's attention kernels that srv does not call: never chosen, and refused if named.

    variants: those that the kernels are for; () for all of the platform's.
    """

    def check(context: ResolutionContext) -> Unfit:
        variant = context.device.variant
        if variants and variant not in variants:
            return Unfit((f"its kernels are for {', '.join(variants)}, not {variant}", NOT_CALLED))
        return Unfit((NOT_CALLED,))

    target = "srv_gpu.native_attention:NativeAttention"
    return BackendSpec(name, priority, check, target, KV_ORDER, traits=_TRAITS_OF_NOT_CALLED, latent=target)


TRITON_ATTENTION = attention(
    TRITON,
    10,
    triton_attention,
    "srv_gpu.triton_attention:TritonAttention",
    traits=TRITON_TRAITS,
    arguments=(NUM_KV_SPLITS, SPLIT_TILE_SIZE, ABSORB_PREFILL, WHOLE_PREFIX),
    latent="srv_gpu.triton_latent:TritonLatentAttention",
)
# Its lengths are host values, and its shapes depend on them, so that its steps are not captured.
NATIVE_ATTENTION = attention(
    "torch_native",
    1,
    _without_scales,
    "srv_gpu.native_attention:NativeAttention",
    graphs=False,
    lengths="host",
    traits=TORCH_TRAITS,
    fallback=True,
)
PYTORCH_SAMPLING = BackendSpec("pytorch", 10, fits, "srv_gpu.sampling:TorchSampling")
TRITON_SAMPLING = BackendSpec(TRITON, 5, _needs(TRITON), "srv_gpu.sampling:TritonSampling")


def triton_target(variant: str) -> str:
    """How the tuning tables of Triton's kernels name a variant: "sm90", "gfx942", and "xpu" for all of Intel's."""
    return variant if variant.startswith(("sm", "gfx")) else "xpu"


def profile(variant: str, gib: int, name: str) -> DeviceFacts:
    """One device with that much memory. name: the vendor's."""
    return DeviceFacts(variant, gib << 30, 1, name)


def profiles(*rows: tuple[str, str, int, str]) -> Mapping[str, DeviceFacts]:
    """Profiles from (profile, variant, GiB, name)."""
    return {row[0]: profile(*row[1:]) for row in rows}

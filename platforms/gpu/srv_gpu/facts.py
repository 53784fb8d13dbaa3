"""What the GPU platforms have in common and is known without a device: capabilities and backend specs. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from srv.platform.facts import BackendSpec, DeviceFacts, Requires, ResolutionContext, Unfit
from srv.specs import LAYER_TRAITS, attention_specs

Check = Callable[[ResolutionContext], Requires | Unfit]

KV_ORDER = "page_token_head"
TRITON_HEAD = 256  # the longest head that Triton's attention computes
TRITON_GROUP = 128  # the most query heads that may share a KV head
FLASHINFER_HEADS = (64, 128, 256)
AITER_HEADS = (128, 256)  # for which its prefill is compiled
AITER_GROUP = 16
_HALVES = ("bfloat16", "float16")
_TRITON = "triton"
_MISSING_TRITON = f"the package {_TRITON} is not installed"
NOT_CALLED = "this version of srv does not call it"

# What holds for every GPU. Capabilities that need Triton: see `capabilities`.
_CAPABILITIES = frozenset({"paged_kv", "prefix_cache", "chunked_prefill", "w8a8", "int8_weights", "float32", "float16"})


def has_package(device: DeviceFacts, package: str) -> bool:
    """Whether a package is installed. Device profiles have no package versions, so it is assumed for them."""
    return not device.versions or package in device.versions


def capabilities(device: DeviceFacts) -> set[str]:
    """What every variant has. Weights in GGUF blocks need Triton's kernels."""
    return set(_CAPABILITIES) | ({"gguf_blocks"} if has_package(device, _TRITON) else set())


def fits(context: ResolutionContext) -> Requires:
    return Requires()


def _needs(package: str) -> Check:
    def check(context: ResolutionContext) -> Requires | Unfit:
        if has_package(context.device, package):
            return Requires()
        return Unfit((f"the package {package} is not installed",))

    return check


def triton_attention(context: ResolutionContext) -> Requires | Unfit:
    """Pages of any size, heads of up to 256 elements."""
    reasons = [] if has_package(context.device, _TRITON) else [_MISSING_TRITON]
    model = context.model
    for group in attention_specs(model.cache_groups) if model is not None else ():
        longest = max(group.key_dim, group.value_dim)
        if longest > TRITON_HEAD:
            reasons.append(f"heads have {longest} elements, more than {TRITON_HEAD}")
        if model is not None and model.heads // group.kv_heads > TRITON_GROUP:
            reasons.append(f"{model.heads // group.kv_heads} query heads share a KV head, more than {TRITON_GROUP}")
    return Unfit(tuple(dict.fromkeys(reasons))) if reasons else Requires()


def half_reasons(context: ResolutionContext) -> list[str]:
    """Why kernels for 16-bit queries and a pool of the same dtype cannot be used, as far as dtypes are known."""
    dtype, kv_dtype = (None if context[name] == "auto" else context[name] for name in ("dtype", "kv_cache_dtype"))
    dtype = dtype or (context.model.dtype if context.model is not None else None)
    if dtype not in (None, *_HALVES):
        return [f"dtype {dtype} is not one of {', '.join(_HALVES)}"]
    if kv_dtype in ("float32", *_HALVES) and dtype is not None and kv_dtype != dtype:
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
    traits: tuple[str, ...] = LAYER_TRAITS,
) -> BackendSpec:
    """The spec of an attention backend; unless stated otherwise, it computes every trait."""
    return BackendSpec(name, priority, check, target, KV_ORDER, graphs=graphs, lengths=lengths, traits=traits)


def not_called(name: str, priority: int, rule: Check) -> BackendSpec:
    """A vendor's attention kernels that srv knows the rules of, but does not call: never chosen, and refused if named.

    The reasons are those of the rule, then that; the page sizes that the kernels read are part of it.
    """

    def check(context: ResolutionContext) -> Unfit:
        answer = rule(context)
        if isinstance(answer, Unfit):
            return Unfit((*answer.reasons, NOT_CALLED))
        pages = answer.values.get("page_size")
        sizes = f" (its pages have {' or '.join(map(str, pages))} tokens)" if pages else ""
        return Unfit((f"{NOT_CALLED}{sizes}",))

    return BackendSpec(name, priority, check, "srv_gpu.native_attention:NativeAttention", KV_ORDER, traits=LAYER_TRAITS)


TRITON_ATTENTION = attention(_TRITON, 10, triton_attention, "srv_gpu.triton_attention:TritonAttention")
# Its lengths are host values, and its shapes depend on them, so that its steps are not captured.
NATIVE_ATTENTION = attention(
    "torch_native", 1, fits, "srv_gpu.native_attention:NativeAttention", graphs=False, lengths="host"
)
PYTORCH_SAMPLING = BackendSpec("pytorch", 10, fits, "srv_gpu.sampling:TorchSampling")
TRITON_SAMPLING = BackendSpec(_TRITON, 5, _needs(_TRITON), "srv_gpu.sampling:TritonSampling")


def triton_target(variant: str) -> str:
    """How Triton's kernels name a variant: "cuda:90", "hip:gfx942", "xpu"."""
    if variant.startswith("sm"):
        return f"cuda:{variant.removeprefix('sm')}"
    return f"hip:{variant}" if variant.startswith("gfx") else "xpu"


def profiles(*rows: tuple[str, str, int, str]) -> Mapping[str, DeviceFacts]:
    """Profiles from (profile, variant, GiB, name)."""
    return {profile: DeviceFacts(variant, memory << 30, 1, name) for profile, variant, memory, name in rows}

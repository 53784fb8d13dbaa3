"""Facts of the CPU platform that hold on every machine: capabilities, defaults, profiles, backends."""

from __future__ import annotations

from collections.abc import Iterator

from srv.dtypes import FLOAT8
from srv.models import derive
from srv.models.families.trees import native_tree_of_model
from srv.platform.experts import MXFP4_PRECISION, TORCH_EXPERTS
from srv.platform.facts import BackendSpec, Default, DeviceFacts, PlatformFacts, Requires, ResolutionContext, Unfit
from srv.specs import ModelFacts, attention_specs
from srv_cpu.latent_forms import (
    ABSORB_PREFILL,
    DETERMINISTIC,
    WHOLE_PREFIX,
    native_prompts,
    torch_prompts,
    why_absorbed,
)
from srv_cpu.op_specs import NATIVE_KERNELS, OPS
from srv_cpu.packed import ORDER, PAGE_SIZES, TORCH_TRAITS, TRAITS, head_dim_reason, latent_reason

_GIB = 1 << 30
_CAPTURED_ROWS = 16
# Prompt tokens per step. Larger chunks delay the first tokens of other requests, and need more memory: 2,048 tokens
# take 70 MB more than 512 (a model with 135M weights).
_CHUNK = 256
COMPILER = "cxx_compiler"  # a machine feature: torch.compile finds a C++ compiler
BFLOAT16_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86, ARM
_CAPABILITIES = frozenset(
    {
        "paged_kv",
        "prefix_cache",
        "chunked_prefill",
        "host_memory",
        "memory_use",
        "communicator",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "send_recv",
        "overlap",
        "w8a8",
        "int8_weights",
        "fp8_weights",
        "fp8_kv",
        "float32",
        "float16",
        "bfloat16",
    }
)


def _fast_in_bfloat16(device: DeviceFacts) -> bool:
    """Whether the processor multiplies bfloat16, or kernels widen it in registers: either halves the bytes to read.

    Otherwise torch converts each operand in memory.
    """
    return NATIVE_KERNELS in device.features or not BFLOAT16_UNITS.isdisjoint(device.features)


def _capabilities(device: DeviceFacts) -> frozenset[str]:
    """Graphs, GGUF-quantized weights, int8 KV and batch invariance need the native kernels; compiled steps need a C++
    compiler."""
    kernels = {"gguf_blocks", "gguf_codebooks", "graphs", "int8_kv", "batch_invariant"}
    native = kernels if NATIVE_KERNELS in device.features else set()
    compiled = {"torch_compile"} if COMPILER in device.features else set()
    return frozenset(_CAPABILITIES | native | compiled)


def _dtype(context: ResolutionContext) -> str | None:
    """float32 checkpoints stay float32; for others, the dtype that this processor is fastest in."""
    if context.model is None or context.model.dtype == "float32":
        return None
    if _fast_in_bfloat16(context.device):
        return "bfloat16"
    return "float32" if context.model.dtype == "float16" or context.model.format == "gguf" else None


def _fits(context: ResolutionContext) -> Requires:
    return Requires()


def _torch_fits(context: ResolutionContext) -> Requires | Unfit:
    """torch operators convert the dtype of a pool but do not apply the scales of int8."""
    if context["kv_cache_dtype"] == "int8":
        latent = context.model is not None and bool(context.model.latents)
        return Unfit((f"it does not support int8 KV pools{'' if latent else '; native does'}",))
    return Requires()


DEFAULTS = (
    Default(
        "dtype",
        _dtype,
        "bfloat16, half the bytes of float32, with native kernels or bfloat16 units; otherwise float32",
    ),
    Default(
        "dequantize_weights",
        lambda context: True if context["dtype"] == "float16" else None,
        "the native kernels multiply GGUF-quantized weights by float32 and bfloat16 only",
        reads=("dtype",),
    ),
    Default(
        "graph_max_batch_size",
        lambda context: None if context["disable_graphs"] or context["graph_batch_sizes"] else _CAPTURED_ROWS,
        "with more rows, kernels take longer than the calls to them",
        reads=("disable_graphs", "graph_batch_sizes"),
    ),
    Default(
        "disable_graph_padding",
        lambda context: None if context["disable_graphs"] or context["graph_batch_sizes"] else True,
        "a padded row costs as much as any other, and every row count is captured",
        reads=("disable_graphs", "graph_batch_sizes"),
    ),
    Default(
        "chunked_prefill_size",
        lambda context: _CHUNK,
        "longer steps delay running requests and need more memory, and are hardly faster per token",
    ),
    Default(
        "mem_fraction_static",
        lambda context: 0.4,
        "the operating system, the API process and the page cache share the host's memory",
    ),
    Default(
        "page_size",
        lambda context: 16,
        "pages of 16 tokens need a sixteenth of the bookkeeping, and still share nearly the whole common prefix",
    ),
)


def _known_dtype(context: ResolutionContext) -> str | None:
    """The dtype, as far as it is known before all arguments are resolved."""
    return context["dtype"] or _dtype(context) or (context.model.dtype if context.model else None)


def _native_reasons(context: ResolutionContext) -> list[str]:
    """Why no native kernel fits."""
    reasons: list[str] = []
    if NATIVE_KERNELS not in context.device.features:
        reasons.append("srv-kernels is installed without native CPU kernels, or they do not load")
    if _known_dtype(context) == "float16":
        reasons.append("dtype float16 is not one of float32, bfloat16")
    return reasons


def _native_experts_fit(context: ResolutionContext) -> Requires | Unfit:
    reasons = _native_reasons(context)
    if context[MXFP4_PRECISION] == "bf16":
        reasons.append(f"it rounds the activations of MXFP4 experts to 8 bits, and {MXFP4_PRECISION} is bf16")
    return Unfit(tuple(reasons)) if reasons else Requires()


def _native_fits(context: ResolutionContext) -> Requires | Unfit:
    """The limits of native attention."""
    reasons, model, dtype = _native_reasons(context), context.model, _known_dtype(context)
    kv_dtype = context["kv_cache_dtype"]
    if kv_dtype not in (None, "auto", "float16", "int8", *FLOAT8, dtype):
        others = f"float16 nor int8 nor {' nor '.join(FLOAT8)}"
        reasons.append(f"kv_cache_dtype {kv_dtype} is neither the activations' dtype {dtype} nor {others}")
    if model is not None:
        heads = {(group.key_dim, group.value_dim) for group in attention_specs(model.cache_groups)}
        reasons += [
            f"keys and values have different head dims: {list(head_pair)}"
            for head_pair in sorted(heads)
            if head_pair[0] != head_pair[1]
        ]
        dims = sorted({dim for head_pair in heads for dim in head_pair})
        reasons += [reason for dim in dims if (reason := head_dim_reason(dim)) is not None]
        sizes = [(group.latent_dim, group.rope_dim) for group in model.latents]
        reasons += [reason for size in sizes if (reason := latent_reason(*size)) is not None]
        if sizes and kv_dtype not in (None, "auto", dtype):
            reasons.append(
                f"kv_cache_dtype {kv_dtype} is not the activations' dtype {dtype}, as latent attention needs"
            )
        if context[WHOLE_PREFIX]:
            reasons += [f"{WHOLE_PREFIX} has no effect: it {reason}" for reason in _absorbing(context, model)]
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": PAGE_SIZES})


def _absorbing(context: ResolutionContext, model: ModelFacts) -> Iterator[str]:
    """Why it computes no keys and values of a prefix, by the sizes of the model's layers with latent attention."""
    native = native_tree_of_model(model)
    layers = () if isinstance(native, str) else derive.attention_layers(native)
    for dims in dict.fromkeys(layer.latent for layer in layers if layer.latent is not None):
        if reason := why_absorbed(dims, {DETERMINISTIC: context[DETERMINISTIC]}):
            yield f"computes no keys and values of a prefix, because {reason}"


BACKENDS = {
    "attention": (
        BackendSpec(
            name="native",
            priority=20,
            check=_native_fits,
            target="srv_cpu.native_attention:NativeAttention",
            kv_order=ORDER,
            graphs=True,
            lengths="device",
            traits=TRAITS,
            arguments=(DETERMINISTIC, ABSORB_PREFILL, WHOLE_PREFIX),
            batch_invariant=True,
            latent="srv_cpu.native_latent:NativeLatentAttention",
            prompts=native_prompts,
        ),
        BackendSpec(
            name="torch_native",
            priority=10,
            check=_torch_fits,
            target="srv_cpu.attention:TorchNativeAttention",
            kv_order="page_token_head",
            lengths="device",
            traits=(*TORCH_TRAITS, "indexer"),
            arguments=(ABSORB_PREFILL, WHOLE_PREFIX),
            fallback=True,
            latent="srv_cpu.latent_attention:TorchLatentAttention",
            prompts=torch_prompts,
        ),
    ),
    "sampling": (
        BackendSpec(
            name="pytorch",
            priority=10,
            check=_fits,
            target="srv_cpu.sampling:CpuSampling",
        ),
    ),
    "moe": (
        BackendSpec(
            name="native",
            priority=20,
            check=_native_experts_fit,
            target="",
            graphs=True,
            batch_invariant=True,
        ),
        TORCH_EXPERTS,
    ),
}

PROFILES = {
    "avx2": DeviceFacts("avx2", 32 * _GIB, 1, "64-bit x86 with AVX2", features=(NATIVE_KERNELS, COMPILER)),
    "avx512": DeviceFacts("avx512", 128 * _GIB, 1, "64-bit x86 with AVX-512", features=(NATIVE_KERNELS, COMPILER)),
    "amx": DeviceFacts(
        "amx",
        256 * _GIB,
        1,
        "64-bit x86 with AMX",
        features=("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", NATIVE_KERNELS, COMPILER),
    ),
    "neon": DeviceFacts("neon", 64 * _GIB, 1, "64-bit ARM with NEON", features=(NATIVE_KERNELS, COMPILER)),
}

FACTS = PlatformFacts(_capabilities, PROFILES, defaults=DEFAULTS, backends=BACKENDS, ops=OPS)

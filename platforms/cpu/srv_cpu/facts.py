"""What is true of the CPU platform whatever the machine: capabilities, defaults, profiles, backends."""

from __future__ import annotations

from srv.platform.facts import BackendSpec, Default, DeviceFacts, PlatformFacts, Requires, ResolutionContext, Unfit
from srv_cpu.packed import COLUMNS, ORDER, PAGE_SIZES
from srv_kernels.cpu.library import MAX_HEAD_DIM

_GIB = 1 << 30
_CAPTURED_ROWS = 16
# Tokens of a prompt in one step. The more, the longer others wait for their first tokens, and the more memory is kept:
# for 2,048 tokens 70 MB more than for 512 (135M weights).
_CHUNK = 256
NATIVE_KERNELS = "native_kernels"  # a feature of a machine on which the library of srv-kernels loads
BFLOAT16_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86, ARM
_CAPABILITIES = frozenset(
    {
        "paged_kv",
        "prefix_cache",
        "chunked_prefill",
        "host_memory",
        "overlap",
        "w8a8",
        "int8_weights",
        "float32",
        "float16",
        "bfloat16",
    }
)


def _fast_in_bfloat16(device: DeviceFacts) -> bool:
    """Whether the processor multiplies bfloat16 itself, or kernels widen it in registers: half the bytes are read.

    Otherwise torch converts each operand in memory.
    """
    return NATIVE_KERNELS in device.features or not BFLOAT16_UNITS.isdisjoint(device.features)


def _capabilities(device: DeviceFacts) -> frozenset[str]:
    """What native kernels alone do: record steps, multiply blocks faster than plain numbers, read keys of 8 bits."""
    native = {"gguf_blocks", "graphs", "int8_kv"} if NATIVE_KERNELS in device.features else frozenset()
    return _CAPABILITIES | native


def _dtype(context: ResolutionContext) -> str | None:
    """A checkpoint that is in float32 stays there; of the others, the type that this processor is fast in."""
    if context.model is None or context.model.dtype == "float32":
        return None
    if _fast_in_bfloat16(context.device):
        return "bfloat16"
    return "float32" if context.model.dtype == "float16" or context.model.format == "gguf" else None


def _fits(context: ResolutionContext) -> Requires:
    return Requires()


def _torch_fits(context: ResolutionContext) -> Requires | Unfit:
    """Torch's operators convert what a pool holds, and know nothing of what scales integers."""
    if context["kv_cache_dtype"] == "int8":
        return Unfit(("it reads no pool in int8; native does",))
    return Requires()


DEFAULTS = (
    Default(
        "dtype",
        _dtype,
        "bfloat16, half of float32's bytes, where the native kernels or units for it are; else float32",
    ),
    Default(
        "dequantize_weights",
        lambda context: True if context["dtype"] == "float16" else None,
        "the native kernels multiply blocks by float32 and bfloat16 alone",
        reads=("dtype",),
    ),
    Default(
        "graph_max_batch_size",
        lambda context: None if context["disable_graphs"] or context["graph_batch_sizes"] else _CAPTURED_ROWS,
        "with more rows the kernels take longer than calling them",
        reads=("disable_graphs", "graph_batch_sizes"),
    ),
    Default(
        "disable_graph_padding",
        lambda context: None if context["disable_graphs"] or context["graph_batch_sizes"] else True,
        "a padded row costs as much arithmetic as any other, and each row count is captured",
        reads=("disable_graphs", "graph_batch_sizes"),
    ),
    Default(
        "chunked_prefill_size",
        lambda context: _CHUNK,
        "longer steps hold running requests up and keep more memory, and their products are hardly faster",
    ),
    Default(
        "mem_fraction_static",
        lambda context: 0.4,
        "the memory is the host's: the operating system, the API process and the page cache live in it too",
    ),
    Default(
        "page_size",
        lambda context: 16,
        "pages of 16 tokens cost a sixteenth of the bookkeeping, and prefixes still share nearly all they could",
    ),
)


def _native_fits(context: ResolutionContext) -> Requires | Unfit:
    """What the native kernels are written for; the dtype is looked at as far as it is known here."""
    reasons: list[str] = []
    if NATIVE_KERNELS not in context.device.features:
        reasons.append("srv-kernels is installed without its native CPU kernels, or they do not load")
    model = context.model
    dtype = context["dtype"] or _dtype(context) or (model.dtype if model else None)
    if dtype == "float16":
        reasons.append("dtype float16 is not one of float32, bfloat16")
    kv_dtype = context["kv_cache_dtype"]
    if kv_dtype not in (None, "auto", "float16", "int8", dtype):
        reasons.append(f"kv_cache_dtype {kv_dtype} is neither the activations' dtype, {dtype}, nor float16, nor int8")
    if model is not None:
        dims = {dim for group in model.cache_groups for dim in (group.key_dim, group.value_dim)}
        if len(dims) > 1:
            reasons.append(f"keys and values have different head dims: {sorted(dims)}")
        reasons += [
            f"head dim {dim} is not a multiple of {COLUMNS} up to {MAX_HEAD_DIM}"
            for dim in sorted(dims)
            if dim % COLUMNS or dim > MAX_HEAD_DIM
        ]
    return Unfit(tuple(reasons)) if reasons else Requires({"page_size": PAGE_SIZES})


BACKENDS = {
    "attention": (
        BackendSpec(
            name="native",
            priority=20,
            check=_native_fits,
            target="srv_cpu.native_attention:NativeAttention",
            kv_order=ORDER,
            graphs=True,
        ),
        BackendSpec(
            name="torch_native",
            priority=10,
            check=_torch_fits,
            target="srv_cpu.attention:TorchNativeAttention",
            kv_order="page_token_head",
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
}

PROFILES = {
    "avx2": DeviceFacts("avx2", 32 * _GIB, 1, "64-bit x86 with AVX2", features=(NATIVE_KERNELS,)),
    "avx512": DeviceFacts("avx512", 128 * _GIB, 1, "64-bit x86 with AVX-512", features=(NATIVE_KERNELS,)),
    "amx": DeviceFacts(
        "amx",
        256 * _GIB,
        1,
        "64-bit x86 with AMX",
        features=("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", NATIVE_KERNELS),
    ),
    "neon": DeviceFacts("neon", 64 * _GIB, 1, "64-bit ARM with NEON", features=(NATIVE_KERNELS,)),
}

FACTS = PlatformFacts(_capabilities, PROFILES, defaults=DEFAULTS, backends=BACKENDS)

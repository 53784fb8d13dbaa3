"""What is true of the CPU platform whatever the machine: capabilities, defaults, profiles, backends."""

from __future__ import annotations

from srv.platform.facts import BackendSpec, Default, DeviceFacts, PlatformFacts, Requires, Seen

_GIB = 1 << 30
_BFLOAT16_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86, ARM
_CAPABILITIES = frozenset(
    {
        "paged_kv",
        "prefix_cache",
        "chunked_prefill",
        "host_memory",
        "overlap",
        "float32",
        "float16",
        "bfloat16",
    }
)


def has_bfloat16_units(device: DeviceFacts) -> bool:
    """Whether the processor multiplies bfloat16 itself, rather than torch converting each operand."""
    return device.variant == "amx" or not _BFLOAT16_UNITS.isdisjoint(device.features)


def _capabilities(device: DeviceFacts) -> frozenset[str]:
    return _CAPABILITIES


def _dtype(seen: Seen) -> str | None:
    """A checkpoint that is in float32 stays there; of the others, the type that this processor is fast in."""
    if seen.model is None or seen.model.dtype == "float32":
        return None
    if has_bfloat16_units(seen.device):
        return "bfloat16"
    return "float32" if seen.model.dtype == "float16" or seen.model.format == "gguf" else None


def _fits(seen: Seen) -> Requires:
    return Requires()


DEFAULTS = (
    Default(
        "dtype",
        _dtype,
        "that is the type this processor multiplies fastest: bfloat16 where it has the units for it, else float32",
    ),
    Default(
        "mem_fraction_static",
        lambda seen: 0.4,
        "the memory is the host's: the operating system, the API process and the page cache live in it too",
    ),
    Default(
        "page_size",
        lambda seen: 16,
        "pages of 16 tokens cost a sixteenth of the bookkeeping, and prefixes still share nearly all they could",
    ),
)

BACKENDS = {
    "attention": (
        BackendSpec(
            name="torch_native",
            priority=10,
            check=_fits,
            target="srv_cpu.attention:TorchNativeAttention",
            kv_order="page_token_head",
            summary="torch operations only: any page size, any head size",
        ),
    ),
    "sampling": (
        BackendSpec(
            name="pytorch",
            priority=10,
            check=_fits,
            target="srv_cpu.sampling:TorchSampling",
            summary="sorting and cumulative sums in torch",
        ),
    ),
}

PROFILES = {
    "avx2": DeviceFacts("avx2", 32 * _GIB, 1, "64-bit x86 with AVX2"),
    "avx512": DeviceFacts("avx512", 128 * _GIB, 1, "64-bit x86 with AVX-512"),
    "amx": DeviceFacts(
        "amx",
        256 * _GIB,
        1,
        "64-bit x86 with AMX",
        features=("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"),
    ),
    "neon": DeviceFacts("neon", 64 * _GIB, 1, "64-bit ARM with NEON"),
}

FACTS = PlatformFacts(_capabilities, PROFILES, defaults=DEFAULTS, backends=BACKENDS)

"""Finds, checks and loads the native library, once per process. Imports no torch.

    SRV_CPU_ISA=avx2     use the kernels of this instruction set, not the best one (generic, avx2, avx512, ...)
    SRV_CPU_NATIVE=0     do not use the library
    SRV_CPU_LIBRARY=...  use another build of it, for example one with sanitizers

Functions are called through `ctypes`, which releases the GIL. A call costs about a microsecond. Callers check pointers
and sizes (see `native_ops` and `native_linear`).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PATH = Path(__file__).parent / "native" / "libsrv_cpu.so"
ABI_VERSION = 23
BLOCK_TOKENS = 16  # tokens in a KV block
MAX_HEAD_DIM = 512  # the widest attention head

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURES = {
    "srv_rms_norm": (_INT, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _FLOAT),
    "srv_add_rms_norm": (_INT, *[_POINTER] * 5, *[_LONG] * 4, _FLOAT),
    "srv_silu_and_mul": (_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    "srv_rotary": (_INT, *[_POINTER] * 6, *[_LONG] * 7),
    "srv_linear": (_INT, *[_POINTER] * 4, *[_LONG] * 4, _INT),
    "srv_int8_weight_linear": (_INT, *[_POINTER] * 5, *[_LONG] * 4, _INT),
    "srv_fp8_linear": (_INT, *[_POINTER] * 5, *[_LONG] * 6, _INT, _INT),
    "srv_pack": (_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    "srv_attention": (_INT, _POINTER),
    "srv_latent_attention": (_INT, _POINTER),
    "srv_w8a8_linear": (_INT, _POINTER),
    "srv_pack_w8a8": (_POINTER, _POINTER, _LONG, _LONG, _LONG),
    "srv_gguf_linear": (_INT, _POINTER),
    "srv_gguf_rows": (_INT, _POINTER),
    "srv_pack_gguf": (_INT, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    "srv_route": (_INT, _POINTER),
    "srv_experts": (_INT, _POINTER),
    "srv_most_likely": (_INT, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG),
    "srv_draw": (_INT, _POINTER),
    "srv_set_threads": (_INT,),
    "srv_shared_abort": (_POINTER,),
    "srv_graph_replay": (_POINTER,),
    "srv_graph_free": (_POINTER,),
}


class AttentionArgs(ctypes.Structure):
    """`AttentionArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "out", "keys", "values")),
        *((name, _POINTER) for name in ("table", "query_lens", "kv_lens", "starts", "sinks")),
        *((name, _LONG) for name in ("rows", "columns", "page_size", "heads", "kv_heads", "dim")),
        *((name, _LONG) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, _FLOAT) for name in ("scale", "soft_cap")),
        *((name, _LONG) for name in ("window", "chunk", "split_keys")),
        ("pool_type", _INT),
        *((name, _FLOAT) for name in ("key_scale", "value_scale")),
        ("temperature_from", _LONG),
    )


class LatentAttentionArgs(ctypes.Structure):
    """`LatentAttentionArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "latent", "rope", "up", "out", "latents", "ropes")),
        *((name, _POINTER) for name in ("table", "query_lens", "kv_lens", "starts")),
        *((name, _LONG) for name in ("rows", "columns", "page_size", "heads")),
        *((name, _LONG) for name in ("latent_dim", "key_dim", "rope_dim", "value_dim")),
        *((name, _LONG) for name in ("q_stride", "latent_stride", "rope_stride", "split_keys")),
        *((name, _LONG) for name in ("materialise_from", "part_keys")),
        ("scale", _FLOAT),
    )


class W8a8LinearArgs(ctypes.Structure):
    """`W8a8LinearArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *(
            (name, _POINTER)
            for name in ("x", "weight", "scales", "compensation", "bias", "out", "quantized", "row_scales")
        ),
        *((name, _LONG) for name in ("rows", "inputs", "outputs", "x_stride")),
        *((name, _FLOAT) for name in ("input_scale_inverse", "input_offset")),
        ("float32_out", _INT),
    )


class GgufLinearArgs(ctypes.Structure):
    """`GgufLinearArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *(
            (name, _POINTER)
            for name in ("x", "weight", "bias", "out", "quantized", "sub_scales", "x_sums", "row_scales")
        ),
        *((name, _LONG) for name in ("rows", "inputs", "outputs", "x_stride", "out_stride")),
        ("ggml_type", _INT),
        ("zero_point", _INT),
        ("float32_out", _INT),
        ("grouping", _POINTER),
        ("columns", _POINTER),
    )


class GgufRowsArgs(ctypes.Structure):
    """`GgufRowsArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "indices", "out")),
        *((name, _LONG) for name in ("rows", "inputs")),
        ("ggml_type", _INT),
    )


class DrawArgs(ctypes.Structure):
    """`DrawArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "temperature", "top_k", "top_p", "min_p", "uniform", "tokens")),
        *((name, _LONG) for name in ("rows", "vocab", "stride")),
    )


class RouteArgs(ctypes.Structure):
    """`RouteArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "bias", "ids", "weights")),
        *((name, _LONG) for name in ("tokens", "experts", "top_k", "stride", "groups", "top_groups")),
        ("scale", _FLOAT),
        ("scoring", _INT),
        ("renormalize", _INT),
    )


class ExpertsArgs(ctypes.Structure):
    """`ExpertsArgs` in native/kernels.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "ids", "weights", "gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, _POINTER) for name in ("gate_up_scales", "down_scales", "out")),
        *((name, _LONG) for name in ("tokens", "hidden", "intermediate", "experts", "top_k", "x_stride")),
        *(
            (name, _INT)
            for name in ("gate_up_type", "down_type", "activation", "gate_up_block_scales", "down_block_scales")
        ),
        *((name, _LONG) for name in ("gate_up_scale_inputs", "down_scale_inputs")),
    )


_ARGS = (  # in the order of srv_sizeof_args
    *(AttentionArgs, W8a8LinearArgs, GgufLinearArgs, GgufRowsArgs, DrawArgs),
    *(RouteArgs, ExpertsArgs, LatentAttentionArgs),
)


@dataclass(frozen=True)
class Loaded:
    """The library, or the reason why it cannot be used."""

    library: ctypes.CDLL | None
    reason: str = ""

    @property
    def isa(self) -> str:
        """The selected instruction set; empty without a library."""
        return "" if self.library is None else self.library.srv_isa().decode()


@lru_cache(maxsize=1)
def load() -> Loaded:
    """The library of this process, according to the environment. Never raises: see `Loaded.reason`."""
    if os.environ.get("SRV_CPU_NATIVE") == "0":
        return Loaded(None, "SRV_CPU_NATIVE=0 turns it off")
    return open_library(Path(os.environ.get("SRV_CPU_LIBRARY") or PATH), os.environ.get("SRV_CPU_ISA", ""))


def open_library(path: Path, isa: str = "") -> Loaded:
    """The library at a path, with the kernels of an instruction set (empty: the best that the processor supports)."""
    if not path.exists():
        return Loaded(None, f"{path} does not exist; build it with: python -m srv_kernels.cpu.build")
    try:
        library = ctypes.CDLL(str(path))
        version = library.srv_abi_version()
    except (OSError, AttributeError) as error:
        return Loaded(None, f"{path} does not load: {error}; build it again with: python -m srv_kernels.cpu.build")
    if version != ABI_VERSION:
        return Loaded(None, f"{path} has interface {version}, not {ABI_VERSION}; run: python -m srv_kernels.cpu.build")
    library.srv_sizeof_args.argtypes, library.srv_sizeof_args.restype = (_INT,), _LONG
    for index, args in enumerate(_ARGS):
        size, expected_size = library.srv_sizeof_args(index), ctypes.sizeof(args)
        if size != expected_size:
            mismatch = f"{path} has {args.__name__} of {size} bytes, not {expected_size}"
            return Loaded(None, f"{mismatch}; run: python -m srv_kernels.cpu.build")
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    library.srv_isa.restype = ctypes.c_char_p
    library.srv_packed_gguf_bytes.argtypes, library.srv_packed_gguf_bytes.restype = (_INT, _LONG, _LONG), _LONG
    library.srv_attention_blocks.argtypes, library.srv_attention_blocks.restype = (_POINTER,), _LONG
    library.srv_gguf_row_bytes.argtypes, library.srv_gguf_row_bytes.restype = (_INT, _LONG), _LONG
    library.srv_graph_capture_begin.argtypes, library.srv_graph_capture_begin.restype = (), _POINTER
    library.srv_graph_capture_end.argtypes, library.srv_graph_capture_end.restype = (), _LONG
    library.srv_shared_group_bytes.argtypes, library.srv_shared_group_bytes.restype = (_LONG,), _LONG
    rank = (_POINTER, _LONG, _LONG, _LONG)  # the mapping, the number of members, this rank, the timeout
    library.srv_shared_all_reduce.argtypes = (_INT, *rank, _POINTER, _LONG)
    library.srv_shared_reduce_scatter.argtypes = (_INT, *rank, _POINTER, _LONG, _POINTER)
    library.srv_shared_all_gather.argtypes = (*rank, _POINTER, _LONG, _POINTER)
    library.srv_shared_all_to_all.argtypes = (*rank, _POINTER, _POINTER, _POINTER)
    library.srv_shared_broadcast.argtypes = (*rank, _POINTER, _LONG, _LONG)
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        getattr(library, f"srv_shared_{name}").restype = _LONG
    for size in (library.srv_packed_elements, library.srv_packed_w8a8_bytes):
        size.argtypes, size.restype = (_LONG, _LONG), _LONG
    if isa and not library.srv_choose_isa(isa.encode()):
        return Loaded(None, f"SRV_CPU_ISA={isa}: this build or this processor does not have these kernels")
    return Loaded(library)

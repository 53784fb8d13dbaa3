"""Which form of latent attention the CPU's backends compute a row in: backends and plans ask the same functions.

    absorbed        queries and results are multiplied by the up-projection; heads attend to the compressed vectors
    materialised    the keys and values of each head are computed from the compressed vectors

Imports no torch, since the facts name what plans say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.specs import LatentDims
from srv_kernels.cpu.library import MAX_HEAD_DIM

ABSORB_PREFILL, WHOLE_PREFIX = "disable_mla_ragged_prefill", "disable_chunked_prefix_cache"
DETERMINISTIC = "enable_deterministic_inference"
PART = 1024  # keys whose heads' keys and values exist at the same time
# Time of a product of the native kernels, absorbed over materialised: 1.5 in float32, and 2.6 in bfloat16 where the
# processor multiplies it (ADR 0095). The smaller one, because others multiply bfloat16 as float32.
_TIME_OF_ABSORBED = 1.5
_SHORT = "compressed vectors are shorter than the keys and values of a head"
_MULTIPLE = 16  # of the sizes of keys and values in native attention


def fewest_by_products(dims: LatentDims, time_of_absorbed: float = 1.0) -> int | None:
    """From how many queries on a row behind a long prefix takes less time materialised; None: it never does.

    Per key and head, q queries take q * (2 latent + rope) products absorbed, and q * (key + rope + value) +
    latent * (key + value) materialised. `time_of_absorbed`: of one product, over that of a materialised one.
    """
    head_dims = dims.key_dim + dims.value_dim
    saved = time_of_absorbed * (2 * dims.latent_dim + dims.rope_dim) - head_dims - dims.rope_dim
    return None if saved <= 0 else -int(-dims.latent_dim * head_dims // saved)


def fewest_materialised(dims: LatentDims, arguments: Mapping[str, Any]) -> int | None:
    """`LatentAttentionArgs.materialise_from` of the native kernel; None: it absorbs all rows."""
    return None if why_absorbed(dims, arguments) else fewest_by_products(dims, _TIME_OF_ABSORBED)


def why_absorbed(dims: LatentDims, arguments: Mapping[str, Any]) -> str:
    """Why the native kernel absorbs all rows, a clause; "" if it does not."""
    for name in (ABSORB_PREFILL, DETERMINISTIC):
        if arguments.get(name):
            return f"{name} is set"
    sizes = dims.key_dim, dims.value_dim
    if any(size % _MULTIPLE for size in sizes):
        return f"keys of {dims.key_dim} and values of {dims.value_dim} elements are not both multiples of {_MULTIPLE}"
    if max(dims.key_dim + dims.rope_dim, dims.value_dim) > MAX_HEAD_DIM:
        heads = f"keys of {dims.key_dim + dims.rope_dim} and values of {dims.value_dim} elements"
        return f"{heads} are not both up to {MAX_HEAD_DIM}"
    return _SHORT if fewest_by_products(dims, _TIME_OF_ABSORBED) is None else ""


def native_prompts(dims: LatentDims, arguments: Mapping[str, Any]) -> str:
    """See `BackendSpec.prompts`."""
    if reason := why_absorbed(dims, arguments):
        return _absorbed(reason)
    fewest = fewest_by_products(dims, _TIME_OF_ABSORBED)
    return _clause(f"prompts and, after a long prefix, rows of at least {fewest} new tokens", arguments)


def torch_prompts(dims: LatentDims, arguments: Mapping[str, Any]) -> str:
    """See `BackendSpec.prompts`."""
    if arguments.get(ABSORB_PREFILL):
        return _absorbed(f"{ABSORB_PREFILL} is set")
    fewest = fewest_by_products(dims)
    return _absorbed(_SHORT) if fewest is None else _clause(f"rows of at least {fewest} new tokens", arguments)


def _absorbed(reason: str) -> str:
    return f"all rows attend to the compressed vectors, because {reason}"


def _clause(rows: str, arguments: Mapping[str, Any]) -> str:
    parts = "for all keys of a row at once" if arguments.get(WHOLE_PREFIX) else f"for {PART:,} keys at a time"
    return f"{rows} compute the keys and values of each head, {parts}, and others attend to the compressed vectors"

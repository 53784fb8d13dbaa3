"""What a model takes, from its facts: parameters, weights and cache, as lines of text. Torch-free.

Nothing is estimated: a size that is not known is said to be unknown, with the reason.
"""

from __future__ import annotations

from typing import assert_never

from srv.args.statement import amount_text
from srv.models.families.registry import is_known, is_native, runs_through_transformers
from srv.planning.kernel import layers_name
from srv.specs import AttentionSpec, CacheSpec, FullAttention, Latent, ModelFacts, Recurrent, SlidingWindow

_SIZES_ONLY = "sizes only"
_NONE = "none: srv knows the sizes of this architecture, but of no layers that run it"
_REFUSED = "none with these settings: see the refusals"


def layers_of(model: ModelFacts, planned: str | None) -> str | None:
    """Whose layers compute a model, as the kernel plan says (`planned`); None if its settings are refused.

    Of a class of transformers that was not examined, its architecture says whether it fits.
    """
    native = planned == layers_name(native=True) if planned is not None else is_native(model.architecture)
    kinds = (AttentionSpec, Latent, Recurrent) if native else (AttentionSpec,)
    fits = all(isinstance(group, kinds) for group in model.cache_groups)
    is_described = native or runs_through_transformers(model.architecture)
    return planned if fits and is_described else _SIZES_ONLY


def cache_bytes_per_token(model: ModelFacts, dtype: str) -> int:
    """Bytes that one token adds to the caches of a request that is longer than all windows. `dtype`: of the pool."""
    groups = [group for group in model.cache_groups if not isinstance(group, Recurrent)]
    return sum(group.bytes_per_token(dtype) for group in groups if group.window is None)


def size_lines(model: ModelFacts, kv_dtype: str, planned: str | None) -> list[tuple[str, str]]:
    """Pairs (quantity, explanation). `kv_dtype`: the torch dtype name of the KV pool. `planned`: as of `layers_of`."""
    part = "" if model.text_part_of is None else " (of the text part, which alone is loaded)"
    lines = [("parameters", f"{_parameters(model)}{part}")]
    if model.unknown_sizes is None:
        where = "from the configuration alone" if model.format == "config" else "on disk"
        method = f", quantized with {model.quantization}" if model.quantization else f" in {model.dtype}"
        lines.append(("weights", f"{_bytes(model.weight_bytes)}{method}, {where}"))
    elif model.parameters is not None:
        lines.append(("weights", f"unknown, from the configuration alone: {model.unknown_sizes}"))
    if not model.has_pool:
        lines.append(("cache", "none: a prompt is computed in one step"))
    elif is_known(model.architecture) or model.format != "config" or model.unknown_sizes is None:
        lines += [("cache", _cache(group, kv_dtype)) for group in model.cache_groups]
    if model.generates and is_known(model.architecture):
        layers = layers_of(model, planned)
        lines.append(("layers", _NONE if layers == _SIZES_ONLY else layers or _REFUSED))
    return lines


def _parameters(model: ModelFacts) -> str:
    if model.parameters is None:
        return f"unknown: {model.unknown_sizes}"
    active = model.active_parameters
    suffix = f", of which {active:,} compute one token" if active is not None and active != model.parameters else ""
    return f"{model.parameters:,}{suffix}"


def _cache(group: CacheSpec, dtype: str) -> str:
    layers = f"{len(group.layers)} layers"
    match group:
        case FullAttention():
            return f"{group.bytes_per_token(dtype):,} bytes per token: {layers} of attention in {dtype}"
        case SlidingWindow():
            bytes_kept = f"{group.bytes_per_token(dtype):,} bytes per token, for the last {group.window:,} of a request"
            return f"{bytes_kept}: {layers} of attention in {dtype}"
        case Latent():
            vector = f"{group.latent_dim} + {group.rope_dim} numbers"
            index = f", {len(group.indexed)} with an index key of {group.index_dim}" if group.indexed else ""
            size = f"{group.bytes_per_token(dtype):,} bytes per token"
            return f"{size}: {layers} of latent attention, {vector}{index} in {dtype}"
        case Recurrent():
            return f"{group.bytes_per_slot():,} bytes per request: {layers} with recurrent states"
        case _ as never:
            assert_never(never)


def _bytes(amount: int) -> str:
    return amount_text(amount, "bytes")

"""Core's own statements: defaults of the layers MODEL and GENERIC, quantities, constraints.

They speak in the same values as a platform's, and are outranked by them. No device is known here beyond its
facts and capabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srv.args.rules import disaggregation, experts, graphs, lora, memory, parallel, reserve, speculative, weights
from srv.args.rules.reserve import ITEM_SIZES
from srv.models.facts import ModelFacts
from srv.platform.facts import Constraint, Contribution, Default, Seen

RESERVED_MEMORY = reserve.RESERVED_MEMORY
QUANTITIES: Mapping[str, str] = MappingProxyType({RESERVED_MEMORY: "bytes"})  # name -> unit
HOST_MEMORY = "host_memory"  # capability: the device computes in the host's own memory

_GIB = 2**30
_CHUNKS = ((35, 2048), (60, 4096), (160, 8192))  # GiB of device memory below which a step has so many prompt tokens
_LARGEST_CHUNK = 16384
_MOST_TOKENS = 10**15  # more than any memory holds, however many requests a user asks for


def _own_dtype(model: ModelFacts) -> str:
    """The type to compute in: of the checkpoint, but bfloat16 where its weights are stored in 4 bits (MXFP4)."""
    return model.dtype if model.dtype in ITEM_SIZES and model.quantization != "mxfp4" else "bfloat16"


def _dtype(seen: Seen) -> str | None:
    if seen.model is None:
        return None
    own = _own_dtype(seen.model)
    return own if own in seen.capabilities or not seen.capabilities else None


def _next_dtype(seen: Seen) -> str | None:
    if seen.model is None or _own_dtype(seen.model) in seen.capabilities:
        return None
    return next((dtype for dtype in ("bfloat16", "float32", "float16") if dtype in seen.capabilities), None)


def _load_format(seen: Seen) -> str | None:
    return seen.model.format if seen.model and seen.model.format in ("gguf", "safetensors") else None


def _chunk(seen: Seen) -> int | None:
    if "chunked_prefill" not in seen.capabilities:
        return -1
    if HOST_MEMORY in seen.capabilities:
        return None
    total = seen.device.memory_bytes
    whole = next((tokens for below, tokens in _CHUNKS if total < below * _GIB), _LARGEST_CHUNK)
    return whole // seen["dp_size"] if seen["enable_dp_attention"] else whole


def _total_tokens(seen: Seen) -> int | None:
    context, page = seen["context_length"], seen["page_size"]
    if HOST_MEMORY not in seen.capabilities or context is None:
        return None
    return min(_MOST_TOKENS, int(2 * seen["max_running_requests"] * -(-context // page) * page))


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default("dtype", _dtype, "the checkpoint is of that type"),
    Default("dtype", _next_dtype, "the platform cannot compute in the checkpoint's own type"),
    Default(
        "context_length",
        lambda seen: seen.model.context_length if seen.model else None,
        "the model was made for that many tokens",
    ),
    Default("served_model_name", lambda seen: seen.model.name if seen.model else None, "that is the name of the model"),
    Default("load_format", _load_format, "the weights lie in that format"),
    *weights.MODEL_DEFAULTS,
    *speculative.MODEL_DEFAULTS,
    *memory.MODEL_DEFAULTS,
)

GENERIC_DEFAULTS: tuple[Default, ...] = (
    Default(
        "kv_cache_dtype",
        lambda seen: None if seen["dtype"] == "auto" else seen["dtype"],
        "keys and values are kept in the type they are computed in",
        reads=("dtype",),
    ),
    Default(
        "tokenizer_path",
        lambda seen: seen.model.path if seen.model else None,
        "the model brings its own tokenizer",
    ),
    *parallel.DEFAULTS,
    *speculative.DEFAULTS,
    *experts.DEFAULTS,
    *lora.DEFAULTS,
    *disaggregation.DEFAULTS,
    *memory.DEFAULTS,
)

# Of layer GENERIC too, but said only where a platform is known; a platform's own word outranks them.
DEVICE_DEFAULTS: tuple[Default, ...] = (
    Default(
        "chunked_prefill_size",
        _chunk,
        "that much the platform and the device's memory bear in one step",
        reads=("enable_dp_attention", "dp_size"),
    ),
    Default(
        "disable_radix_cache",
        lambda seen: None if "prefix_cache" in seen.capabilities else True,
        "the platform's attention cannot share pages",
    ),
    Default(
        "dequantize_weights",
        lambda seen: None if "gguf_blocks" in seen.capabilities else True,
        "the platform multiplies plain numbers alone",
    ),
    Default(
        "disable_overlap_schedule",
        lambda seen: None if "overlap" in seen.capabilities else True,
        "the platform computes nothing while the host plans",
    ),
    Default(
        "max_total_tokens",
        _total_tokens,
        "twice what all running requests can hold is enough, and the memory is the host's",
        reads=("max_running_requests", "context_length", "page_size"),
    ),
    *reserve.FRACTIONS,
    *graphs.DEVICE_DEFAULTS,
)

CONTRIBUTIONS: tuple[Contribution, ...] = (
    *reserve.ESTIMATE,
    *parallel.CONTRIBUTIONS,
    *speculative.CONTRIBUTIONS,
    *memory.CONTRIBUTIONS,
)


def _context_fits(seen: Seen) -> str | None:
    model, wanted = seen.model, seen["context_length"]
    if model is None or wanted is None or wanted <= model.context_length:
        return None
    return f"model {model.name} has a context of {model.context_length} tokens"


def _format_fits(seen: Seen) -> str | None:
    model, wanted = seen.model, seen["load_format"]
    if model is None or wanted == "dummy":
        return None
    if model.format == "config":
        return f"{model.path} holds a configuration but no weights"
    return None if wanted in ("auto", model.format) else f"the weights of {model.path} are {model.format}"


def _dtype_possible(argument: str) -> Constraint:
    def check(seen: Seen) -> str | None:
        wanted = seen[argument]
        if wanted not in ITEM_SIZES or wanted in seen.capabilities:
            return None
        able = ", ".join(sorted(seen.capabilities & ITEM_SIZES.keys())) or "none"
        return f"the platform has no {wanted} on this device (it has {able})"

    return Constraint(argument, "dtype_missing", check, "Choose a type that it has, or leave it out.")


def _kv_dtype(seen: Seen) -> str | None:
    if seen["kv_cache_dtype"] != "int8" or "int8_kv" in seen.capabilities:
        return None
    return "the platform keeps no keys and values of 8-bit integers (capability int8_kv)"


def _needs(argument: str, capability: str, without: object, reason: str, remedy: str) -> Constraint:
    """Without the capability, the argument takes the one value `without`."""

    def check(seen: Seen) -> str | None:
        return None if capability in seen.capabilities or seen[argument] == without else reason

    return Constraint(argument, "capability_missing", check, remedy)


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "context_length",
        "context_over_model",
        _context_fits,
        "Ask for no more, or leave it out to take all of it.",
    ),
    Constraint(
        "load_format",
        "format_not_there",
        _format_fits,
        "Name a model that has such weights (--model-path), or pass --load-format dummy for random ones.",
    ),
    *weights.CONSTRAINTS,
    *parallel.CONSTRAINTS,
    *speculative.CONSTRAINTS,
    *experts.CONSTRAINTS,
    *lora.CONSTRAINTS,
    *disaggregation.CONSTRAINTS,
    *memory.CONSTRAINTS,
    *graphs.CONSTRAINTS,
)

# Said only where a platform is known.
DEVICE_CONSTRAINTS: tuple[Constraint, ...] = (
    *weights.DEVICE_CONSTRAINTS,
    _dtype_possible("dtype"),
    _dtype_possible("kv_cache_dtype"),
    Constraint("kv_cache_dtype", "capability_missing", _kv_dtype, "Choose another type, or leave it out."),
    _needs(
        "chunked_prefill_size",
        "chunked_prefill",
        -1,
        "the platform cannot extend a prompt that is partly computed (capability chunked_prefill)",
        "Leave it out, or set it to -1.",
    ),
    _needs(
        "disable_radix_cache",
        "prefix_cache",
        True,
        "the platform's attention cannot share pages (capability prefix_cache)",
        "Leave it out, or set it to true.",
    ),
    _needs(
        "dequantize_weights",
        "gguf_blocks",
        True,
        "the platform multiplies plain numbers alone (capability gguf_blocks)",
        "Leave it out, or set it to true.",
    ),
    _needs(
        "disable_overlap_schedule",
        "overlap",
        True,
        "the platform computes nothing while the host plans (capability overlap)",
        "Leave it out, or set it to true.",
    ),
    _needs(
        "disable_graphs",
        "graphs",
        True,
        "the platform cannot replay a captured step (capability graphs)",
        "Leave it out, or set it to true.",
    ),
)

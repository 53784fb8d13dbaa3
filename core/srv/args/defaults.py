"""Core's own defaults (of the layers MODEL and GENERIC), contributions to quantities, and constraints.

They have the same types as a platform's. A platform's defaults override core's, and its contributions can replace them.
This module must not know any device beyond its facts and capabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srv.args.prerequisites import PREREQUISITES
from srv.args.rules import (
    debugging,
    determinism,
    disaggregation,
    embeddings,
    experts,
    grammar,
    graphs,
    inert,
    loading,
    lora,
    memory,
    offload,
    parallel,
    pieces,
    products,
    recurrent,
    reserve,
    server,
    speculative,
    weights,
)
from srv.dtypes import FLOAT8, ITEM_SIZES
from srv.models.layers.rope_config import limit_reason
from srv.platform.facts import Constraint, Contribution, Default, ResolutionContext
from srv.quantization.registry import find
from srv.specs import ModelFacts

RESERVED_MEMORY = reserve.RESERVED_MEMORY
QUANTITIES: Mapping[str, str] = MappingProxyType({RESERVED_MEMORY: "bytes"})  # name -> unit
HOST_MEMORY = "host_memory"  # capability: the device memory is the host memory

_GIB = 2**30
_CHUNK_SIZES = ((35, 2048), (60, 4096), (160, 8192))  # (below this many GiB of device memory, prompt tokens per step)
_MAX_CHUNK_SIZE = 16384
_MAX_TOTAL_TOKENS = 10**15  # more than any memory holds; bounds the product of the user's values


def _checkpoint_dtype(model: ModelFacts) -> str:
    """The activation dtype: that of the checkpoint, unless its quantization method has another (MXFP4: bfloat16)."""
    method = find(model.quantization)
    dtype = method.dtype if method is not None else ""
    return dtype or (model.dtype if model.dtype in ITEM_SIZES else "bfloat16")


def _dtype(context: ResolutionContext) -> str | None:
    if context.model is None or context.model.assumes_dtype:
        return None
    return _supported_dtype(context)


def _assumed_dtype(context: ResolutionContext) -> str | None:
    return _supported_dtype(context) if context.model is not None and context.model.assumes_dtype else None


def _supported_dtype(context: ResolutionContext) -> str | None:
    assert context.model is not None
    dtype = _checkpoint_dtype(context.model)
    return dtype if dtype in context.capabilities or not context.capabilities else None


def _fallback_dtype(context: ResolutionContext) -> str | None:
    if context.model is None or _checkpoint_dtype(context.model) in context.capabilities:
        return None
    return next((dtype for dtype in ("bfloat16", "float32", "float16") if dtype in context.capabilities), None)


def _load_format(context: ResolutionContext) -> str | None:
    return context.model.format if context.model and context.model.format in ("gguf", "safetensors") else None


def _chunk_size(context: ResolutionContext) -> int | None:
    if "chunked_prefill" not in context.capabilities:
        return -1
    if HOST_MEMORY in context.capabilities:
        return None
    total = context.device.memory_bytes
    return next((tokens for below, tokens in _CHUNK_SIZES if total < below * _GIB), _MAX_CHUNK_SIZE)


def _max_total_tokens(context: ResolutionContext) -> int | None:
    length, page = context["context_length"], context["page_size"]
    if HOST_MEMORY not in context.capabilities or length is None:
        return None
    return min(_MAX_TOTAL_TOKENS, int(2 * context["max_running_requests"] * -(-length // page) * page))


MODEL_DEFAULTS: tuple[Default, ...] = (
    Default("dtype", _dtype, "it is the dtype of the checkpoint"),
    Default(
        "dtype",
        _assumed_dtype,
        "it is assumed: config.json states none, there are no weights that show it, and checkpoints are published in "
        "16 bits, but encoders in float32",
    ),
    Default("dtype", _fallback_dtype, "the platform does not support the dtype of the checkpoint"),
    Default(
        "context_length",
        lambda context: context.model.context_length if context.model else None,
        "it is the context length of the model",
    ),
    Default(
        "served_model_name",
        lambda context: context.model.name if context.model else None,
        "it is the name of the model",
    ),
    Default("load_format", _load_format, "it is the format of the model's weight files"),
    *weights.MODEL_DEFAULTS,
    *embeddings.MODEL_DEFAULTS,
    *speculative.MODEL_DEFAULTS,
)

GENERIC_DEFAULTS: tuple[Default, ...] = (
    Default(
        "kv_cache_dtype",
        lambda context: None if context["dtype"] == "auto" else context["dtype"],
        "keys and values are stored in the dtype in which they are computed",
        reads=("dtype",),
    ),
    Default(
        "tokenizer_path",
        lambda context: context.model.path if context.model and not context["skip_tokenizer_init"] else None,
        "the tokenizer is taken from the model",
        reads=("skip_tokenizer_init",),
    ),
    *parallel.DEFAULTS,
    *speculative.DEFAULTS,
    *experts.DEFAULTS,
    *lora.DEFAULTS,
    *disaggregation.DEFAULTS,
    *grammar.DEFAULTS,
    *offload.DEFAULTS,
)

# Defaults of layer GENERIC that apply only if a platform is known; the platform's own defaults override them.
DEVICE_DEFAULTS: tuple[Default, ...] = (
    Default(
        "chunked_prefill_size",
        _chunk_size,
        "it is the largest step that suits the platform and its device memory",
    ),
    Default(
        "disable_radix_cache",
        lambda context: None if "prefix_cache" in context.capabilities else True,
        "the platform's attention cannot share pages",
    ),
    Default(
        "dequantize_weights",
        lambda context: True if _cannot_read_blocks(context) is not None else None,
        "the platform cannot compute with GGUF-quantized weights",
    ),
    Default(
        "disable_overlap_schedule",
        lambda context: None if "overlap" in context.capabilities else True,
        "the platform cannot overlap computation with scheduling",
    ),
    Default(
        "max_total_tokens",
        _max_total_tokens,
        "twice the tokens of all running requests is enough, and the pool takes host memory",
        reads=("max_running_requests", "context_length", "page_size"),
    ),
    *reserve.FRACTIONS,
    *graphs.DEVICE_DEFAULTS,
)

CONTRIBUTIONS: tuple[Contribution, ...] = (
    *reserve.ESTIMATE,
    *pieces.ESTIMATE,
    *speculative.CONTRIBUTIONS,
)


def _context_fits(context: ResolutionContext) -> str | None:
    model, length = context.model, context["context_length"]
    if model is None or length is None or length <= model.context_length:
        return None
    of_model = f"model {model.name} has a context length of {model.context_length} tokens"
    reason = limit_reason(model.config, model.context_length)
    return of_model if reason is None else f"{of_model}: {reason}"


def _format_fits(context: ResolutionContext) -> str | None:
    model, load_format = context.model, context["load_format"]
    if model is None or load_format == "dummy":
        return None
    if model.format == "config":
        return None if context["custom_weight_loader"] else f"{model.path} has a configuration but no weights"
    return None if load_format in ("auto", model.format) else f"the weights of {model.path} are {model.format}"


def _dtype_supported(argument: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        dtype = context[argument]
        if dtype not in ITEM_SIZES or dtype in context.capabilities:
            return None
        supported = ", ".join(sorted(context.capabilities & ITEM_SIZES.keys())) or "no dtype"
        return f"the platform does not support {dtype} on this device (it supports {supported})"

    return Constraint(argument, "dtype_missing", check, "Choose a supported dtype, or leave it out.")


def _int8_kv_supported(context: ResolutionContext) -> str | None:
    if context["kv_cache_dtype"] != "int8" or "int8_kv" in context.capabilities:
        return None
    return "the platform does not support an int8 KV pool (capability int8_kv)"


def _fp8_kv_supported(context: ResolutionContext) -> str | None:
    if context["kv_cache_dtype"] not in FLOAT8 or "fp8_kv" in context.capabilities:
        return None
    return "the platform does not support a KV pool of 8-bit floats (capability fp8_kv)"


def _cannot_read_blocks(context: ResolutionContext) -> str | None:
    """Why the weights of a GGUF file have to be dequantized; None for another file."""
    if "gguf_blocks" in context.capabilities or (context.model is not None and context.model.format != "gguf"):
        return None
    return "the platform cannot compute with GGUF-quantized weights (capability gguf_blocks)"


def _requires_capability(argument: str, capability: str, without: object, reason: str, remedy: str) -> Constraint:
    """Without the capability, the only valid value of the argument is `without`."""

    def check(context: ResolutionContext) -> str | None:
        return None if capability in context.capabilities or context[argument] == without else reason

    return Constraint(argument, "capability_missing", check, remedy)


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "context_length",
        "context_over_model",
        _context_fits,
        "Set it to no more than that, or leave it out to use all of it.",
    ),
    Constraint(
        "load_format",
        "format_not_there",
        _format_fits,
        "Choose a model with such weights (--model-path), or pass --load-format dummy for random weights.",
        reads=("custom_weight_loader",),
    ),
    *weights.CONSTRAINTS,
    *offload.CONSTRAINTS,
    *loading.CONSTRAINTS,
    *embeddings.CONSTRAINTS,
    *parallel.CONSTRAINTS,
    *speculative.CONSTRAINTS,
    *experts.CONSTRAINTS,
    *lora.CONSTRAINTS,
    *disaggregation.CONSTRAINTS,
    *memory.CONSTRAINTS,
    *graphs.CONSTRAINTS,
    *pieces.CONSTRAINTS,
    *server.CONSTRAINTS,
    *determinism.CONSTRAINTS,
    *grammar.CONSTRAINTS,
    *debugging.CONSTRAINTS,
    *recurrent.CONSTRAINTS,
)

# Constraints on values that a user sets. Nobody expects an effect of those of other layers.
USER_CONSTRAINTS: tuple[Constraint, ...] = (
    *PREREQUISITES,
    *speculative.USER_CONSTRAINTS,
    *graphs.USER_CONSTRAINTS,
    *inert.USER_CONSTRAINTS,
    *products.USER_CONSTRAINTS,
    *recurrent.USER_CONSTRAINTS,
    *debugging.USER_CONSTRAINTS,
    *experts.USER_CONSTRAINTS,
    *loading.USER_CONSTRAINTS,
)

# Constraints that apply only if a platform is known.
DEVICE_CONSTRAINTS: tuple[Constraint, ...] = (
    *weights.DEVICE_CONSTRAINTS,
    *offload.DEVICE_CONSTRAINTS,
    *parallel.DEVICE_CONSTRAINTS,
    _dtype_supported("dtype"),
    _dtype_supported("kv_cache_dtype"),
    Constraint("kv_cache_dtype", "capability_missing", _int8_kv_supported, "Choose another dtype, or leave it out."),
    Constraint("kv_cache_dtype", "capability_missing", _fp8_kv_supported, "Choose another dtype, or leave it out."),
    _requires_capability(
        "chunked_prefill_size",
        "chunked_prefill",
        -1,
        "the platform cannot compute a prompt in chunks (capability chunked_prefill)",
        "Leave it out, or set it to -1.",
    ),
    _requires_capability(
        "disable_radix_cache",
        "prefix_cache",
        True,
        "the platform's attention cannot share pages (capability prefix_cache)",
        "Leave it out, or set it to true.",
    ),
    Constraint(
        "dequantize_weights",
        "capability_missing",
        lambda context: None if context["dequantize_weights"] else _cannot_read_blocks(context),
        "Leave it out, or set it to true.",
    ),
    _requires_capability(
        "disable_overlap_schedule",
        "overlap",
        True,
        "the platform cannot overlap computation with scheduling (capability overlap)",
        "Leave it out, or set it to true.",
    ),
    _requires_capability(
        "disable_graphs",
        "graphs",
        True,
        "the platform cannot replay a captured step (capability graphs)",
        "Leave it out, or set it to true.",
    ),
)

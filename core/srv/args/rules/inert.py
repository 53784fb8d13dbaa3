"""Values that cannot have an effect beside the others that are set: refused with code `inert`, if a user set them.

A value is inert if no value of its argument could change anything. A limit that is merely not reached is not, nor is a
value that asks for what happens anyway, as the default does. Prerequisites that hold for every value are in the
declarations (`Arg.only_with`), and those of graphs, drafters and backends with their other rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from srv.args.backend_groups import has_indexer
from srv.args.groups.memory import MemoryArgs
from srv.args.groups.platform import PlatformArgs
from srv.args.groups.schedule import ScheduleArgs
from srv.args.groups.weights import WeightsArgs
from srv.platform.facts import Constraint, ResolutionContext
from srv.quantization.formats.fp8 import METHOD as FP8
from srv.quantization.formats.online import INT8WO
from srv.quantization.registry import method_of
from srv.specs import SlidingWindow

CODE = "inert"

# Values of other arguments with which an argument has an effect, where their defaults make it inert or refuse it.
_DUMPED = {"debug_tensor_dump_output_folder": Path("dumps"), "disable_graphs": True}
_TWO_REPLICAS = {"tp_size": 2, "dp_size": 2}
EFFECTIVE_WITH: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "max_prefill_tokens": {"chunked_prefill_size": -1},
        "tokenizer_metrics_custom_labels_header": {"tokenizer_metrics_allowed_custom_labels": ("team",)},
        "debug_tensor_dump_output_folder": {"disable_graphs": True},
        "debug_tensor_dump_prefill_only": _DUMPED,
        "debug_tensor_dump_input_file": _DUMPED,
        "forward_hooks": {"disable_graphs": True},
        "max_mamba_cache_size": {"max_running_requests": 1},
        "offload_num_in_group": {"offload_group_size": 4},
        "offload_prefetch_step": {"offload_group_size": 1},
        "quantization_param_path": {"kv_cache_dtype": "fp8_e4m3"},
        "calculate_kv_scales": {"kv_cache_dtype": "fp8_e4m3"},
        "fp8_gemm_backend": {"quantization": FP8.name},
        "activation_precision": {"torchao_config": INT8WO.name},
        "enable_dp_attention": _TWO_REPLICAS,
        "enable_dp_lm_head": {**_TWO_REPLICAS, "enable_dp_attention": True},
        "ep_size": {"tp_size": 2},
    }
)

_MEMORY = MemoryArgs()
_DEFAULT_PREFILL = ScheduleArgs().max_prefill_tokens


def _prompts_are_split(context: ResolutionContext) -> str | None:
    chunk = context["chunked_prefill_size"]
    if chunk <= 0 or context["max_prefill_tokens"] == _DEFAULT_PREFILL:
        return None
    return f"prompts are split, so that chunked_prefill_size ({chunk}) limits the prompt tokens of a step"


def _no_prefixes(context: ResolutionContext) -> str | None:
    if context["schedule_policy"] != "lpm" or not context["disable_radix_cache"]:
        return None
    return "without a prefix cache no prefix is longer than another (disable_radix_cache is true)"


def _nothing_to_dequantize(context: ResolutionContext) -> str | None:
    model = context.model
    if model is None or not context["dequantize_weights"]:
        return None
    method = method_of(model)
    if method is not None and method.dequantizable and model.quantization is not None:
        return None
    return f"no weights of {model.path} are quantized in a way that a loader of srv can undo"


def _no_pool_to_size(context: ResolutionContext) -> str | None:
    model = context.model
    if model is None or context["swa_full_tokens_ratio"] is None:
        return None
    if any(isinstance(group, SlidingWindow) for group in model.cache_groups[1:]):
        return None
    return "no layers with a window have a pool of their own in this model"


def _no_pool_to_merge(context: ResolutionContext) -> str | None:
    model = context.model
    if model is None or not context["disable_hybrid_swa_memory"]:
        return None
    windows = any(isinstance(group, SlidingWindow) for group in model.cache_groups)
    return None if windows else "no layer of the model has a window"


def _no_pool(argument: str, default: object, *, reads: tuple[str, ...] = ()) -> Constraint:
    """`reads`: arguments whose values ask for what the default does."""

    def check(context: ResolutionContext) -> str | None:
        if context.model is None or context.model.has_pool:
            return None
        if context[argument] in (default, *(context[read] for read in reads)):
            return None
        return "all layers of the model attend within one step, so that it has no KV pool"

    return Constraint(argument, CODE, check, "Leave it out.", reads=reads)


def _nothing_to_compile(context: ResolutionContext) -> str | None:
    if context.model is None or context.model.generates or not context["enable_torch_compile"]:
        return None
    return "only decode steps are compiled, and the model generates no text"


def _no_latents(argument: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        model = context.model
        if model is None or not context[argument] or model.latents:
            return None
        return "no layer of the model has latent attention (MLA)"

    return Constraint(argument, CODE, check, "Leave it out.")


def _no_keys_of_a_prefix(context: ResolutionContext) -> str | None:
    if not context["disable_chunked_prefix_cache"] or not context["disable_mla_ragged_prefill"]:
        return None
    return "all rows attend to the compressed vectors (disable_mla_ragged_prefill is true)"


def _no_indexer(argument: str) -> Constraint:
    def check(context: ResolutionContext) -> str | None:
        if context.model is None or context[argument] is None or has_indexer(context.model):
            return None
        return "no layer of the model has an indexer, which chooses the keys of sparse attention"

    remedy = "Leave it out, or choose the backend with --attention-backend."
    return Constraint(argument, CODE, check, remedy)


# Constraints on values that a user sets.
USER_CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "max_prefill_tokens",
        CODE,
        _prompts_are_split,
        "Set --chunked-prefill-size instead; or set that to -1, so that prompts are not split.",
        reads=("chunked_prefill_size",),
    ),
    Constraint(
        "schedule_policy",
        CODE,
        _no_prefixes,
        "Leave it out, or leave the prefix cache on.",
        reads=("disable_radix_cache",),
    ),
    Constraint("dequantize_weights", CODE, _nothing_to_dequantize, "Leave it out."),
    Constraint("swa_full_tokens_ratio", CODE, _no_pool_to_size, "Leave it out."),
    Constraint("disable_hybrid_swa_memory", CODE, _no_pool_to_merge, "Leave it out."),
    Constraint("enable_torch_compile", CODE, _nothing_to_compile, "Leave it out."),
    _no_pool("max_total_tokens", _MEMORY.max_total_tokens),
    _no_pool("page_size", _MEMORY.page_size),
    _no_pool("kv_cache_dtype", PlatformArgs().kv_cache_dtype, reads=("dtype",)),
    _no_pool("quantization_param_path", WeightsArgs().quantization_param_path),
    _no_pool("calculate_kv_scales", WeightsArgs().calculate_kv_scales),
    _no_latents("disable_mla_ragged_prefill"),
    _no_latents("disable_chunked_prefix_cache"),
    Constraint(
        "disable_chunked_prefix_cache",
        CODE,
        _no_keys_of_a_prefix,
        "Leave one of the two out.",
        reads=("disable_mla_ragged_prefill",),
    ),
    _no_indexer("nsa_prefill_backend"),
    _no_indexer("nsa_decode_backend"),
)

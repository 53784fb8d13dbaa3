"""Records of models, endpoints, ops, and pairs of arguments that depend on each other.

    model:ARCHITECTURE/FORMAT      the native architectures, and all others through transformers
    model:ARCHITECTURE/METHOD      the native decoders quantized (`srv_matrix.weight_methods`)
    endpoint:METHOD PATH           the routes of the HTTP server
    op:NAME/DTYPE                  the ops of the kernel contracts, and which of them each platform's package implements
    pair:ARGUMENT+ARGUMENT         dependencies by constraints and backends (`srv_matrix.pairs`)

All are judged as a launch is: by resolution, constraints and the checks of backends. This module writes no page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from srv.models import derive
from srv.models.families.registry import built_in_native_names, find
from srv.models.families.trees import native_tree, pooled_of
from srv.models.unsupported import UnsupportedConfig
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts
from srv_matrix.inventory import Inventory
from srv_matrix.judge import model_verdict, verdict
from srv_matrix.pairs import Answers, pairs
from srv_matrix.records import Record, Status
from srv_matrix.variant_context import VariantContext, make_variant_context
from srv_matrix.weight_methods import quantized_models, weight_methods

NOT_IMPLEMENTED = "not_implemented"  # the reason code of a platform without device code
OTHERS = "any other decoder"
LAYERS = 6  # of the models of architectures: those of every kind that an architecture has, in a fraction of the time
# Fields of configurations that transformers has no default for, or one that no published model has.
UNSTATED: Mapping[str, Mapping[str, Any]] = {
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 1},  # of its 35 layers, 15 are such by default
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "Dots1ForCausalLM": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "BailingMoeForCausalLM": {"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "BailingMoeV2ForCausalLM": {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention" if layer == 5 else "mamba" for layer in range(LAYERS)]},
    "XverseForCausalLM": {"num_experts": 64, "moe_top_k": 6, "num_shared_experts": 2},
    "BambaForCausalLM": {"attn_layer_indices": [3]},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-M*-M"},
    "Grok1ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": None},
}
CHECKED = "served only if logits do not depend on how the prompt is split, which is tested when the model is loaded"


def features(
    manifests: Iterable[Manifest], models: Sequence[ModelFacts], inventory: Inventory, *, methods: bool = True
) -> tuple[Record, ...]:
    """All records that are not of arguments, by kind, then by platform. `methods`: with those of quantized models."""
    contexts = [
        make_variant_context(manifest, variant, models[0]) for manifest in manifests for variant in manifest.variants
    ]
    answers: Answers = {}
    native, other = tuple(_described_models(models)), _in_safetensors(models)
    unquantized = {
        (context.manifest.name, context.variant): tuple(_models(context, native, other, inventory))
        for context in contexts
    }
    all_features = [
        *(record for records in unquantized.values() for record in records),
        *(_quantized(contexts, native, unquantized) if methods else ()),
        *(record for context in contexts for record in _endpoints(context, inventory)),
        *(record for context in contexts for record in op_records(context, inventory)),
        *(record for context in contexts for record in pairs(context, answers)),
    ]
    return tuple(all_features)


def without_device_code(records: Iterable[Record], unbuilt: Mapping[str, str]) -> Iterator[Record]:
    """The records, with whatever works on a platform that cannot start as planned. `unbuilt`: as in `Inventory`."""
    for record in records:
        if record.platform in unbuilt and record.declared.works:
            yield replace(
                record,
                declared=Status.PLANNED,
                reason_code=NOT_IMPLEMENTED,
                reason=unbuilt[record.platform],
                base=None,
                values=(),
            )
        else:
            yield record


# ---- models


class DescribedModel(NamedTuple):
    """A sample model of one architecture. `unsupported`: why core does not support it natively; "" if it does."""

    model: ModelFacts
    unsupported: str = ""


def _models(
    context: VariantContext, native: Sequence[DescribedModel], other: ModelFacts, inventory: Inventory
) -> Iterator[Record]:
    """Native architectures in each of their formats, then all others through transformers, with the sizes of `other`.

    All are judged with the defaults of all arguments.
    """
    unbuilt = inventory.unbuilt.get(context.manifest.name)
    for row in native:
        facts, code_and_reason = (Status.SUPPORTED, Status.SUPPORTED), ("", "")
        if row.unsupported:
            facts, code_and_reason = (Status.SUPPORTED, Status.UNSUPPORTED), ("unsupported_config", row.unsupported)
        judged = model_verdict(row.model, context.manifest, context.device)
        if not judged.accepted:
            facts, code_and_reason = (Status.UNSUPPORTED, facts[1]), (judged.code, judged.reason)
        elif unbuilt is not None:
            facts, code_and_reason = (Status.PLANNED, facts[1]), (NOT_IMPLEMENTED, unbuilt)
        yield context.record("model", f"{row.model.architecture}/{row.model.format}", facts, code_and_reason)
    judged = verdict("model_impl", "transformers", [other], (context.manifest, context.device))
    declared = Status.SUPPORTED if judged.accepted else Status.UNSUPPORTED
    code_and_reason = ("checked_at_load", CHECKED) if judged.accepted else (judged.code, judged.reason)
    if judged.accepted and unbuilt is not None:
        declared, code_and_reason = Status.PLANNED, (NOT_IMPLEMENTED, unbuilt)
    yield context.record("model", f"{OTHERS}/safetensors", (declared, Status.LIMITED), code_and_reason)


def _quantized(
    contexts: Sequence[VariantContext],
    native: Sequence[DescribedModel],
    unquantized: Mapping[tuple[str, str], Sequence[Record]],
) -> Iterator[Record]:
    """The native decoders in each quantization method. `unquantized`: the records of models on each variant."""
    models = [
        row.model for row in native if row.model.format == "safetensors" and row.model.generates and not row.unsupported
    ]
    ends = {f"model:{model.architecture}/safetensors": model.architecture for model in models}
    plain = {
        variant: {ends[record.feature]: record for record in records if record.feature in ends}
        for variant, records in unquantized.items()
    }
    return weight_methods(contexts, quantized_models(models), plain)


def _described_models(models: Sequence[ModelFacts]) -> Iterator[DescribedModel]:
    """The native architectures, each in each of its formats."""
    safetensors = _in_safetensors(models)
    gguf = next((model for model in models if model.format == "gguf"), None)
    for architecture in built_in_native_names():
        yield _describe(architecture, safetensors)
        facts = find(architecture)
        if gguf is not None and facts is not None and facts.gguf is not None:
            yield _describe(architecture, gguf)


def _in_safetensors(models: Sequence[ModelFacts]) -> ModelFacts:
    return next(model for model in models if model.format == "safetensors")


def _describe(architecture: str, like: ModelFacts) -> DescribedModel:
    """An architecture with the sizes of a sample model."""
    config: dict[str, Any] = {
        "hidden_size": like.hidden_size,
        "intermediate_size": like.config["intermediate_size"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": like.heads,
        "num_key_value_heads": like.kv_heads,
        "vocab_size": like.vocab_size,
        "max_position_embeddings": like.context_length,
        **UNSTATED.get(architecture, {}),
    }
    model = replace(like, architecture=architecture, config=config, layers=LAYERS)
    try:
        tree = native_tree(architecture, config)
    except UnsupportedConfig as error:
        return DescribedModel(model, str(error))
    groups = derive.cache_groups(tree, like.context_length, like.dtype)
    layer = derive.attention_layers(tree)[0]
    model = replace(model, heads=layer.heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim, cache_groups=groups)
    return DescribedModel(replace(model, generates=pooled_of(architecture, config) is None))


# ---- endpoints and ops


def _endpoints(context: VariantContext, inventory: Inventory) -> Iterator[Record]:
    """Core implements the endpoints independently of the platform, so they have no level until a test has run there.

    On a platform without device code no server starts.
    """
    unbuilt = inventory.unbuilt.get(context.manifest.name)
    for endpoint in inventory.endpoints:
        if unbuilt is None:
            record = context.record("endpoint", endpoint, (Status.SUPPORTED, Status.SUPPORTED))
            yield replace(record, declared_by="", base=None)
        else:
            yield context.record("endpoint", endpoint, (Status.PLANNED, Status.SUPPORTED), (NOT_IMPLEMENTED, unbuilt))


def op_records(context: VariantContext, inventory: Inventory) -> Iterator[Record]:
    """A record of each op in each dtype: whether the platform's package implements it; unknown without an inventory."""
    implemented = inventory.implemented.get(f"{context.manifest.name}:{context.variant}")
    unbuilt = inventory.unbuilt.get(context.manifest.name)
    for op in inventory.ops:
        for dtype in op.dtypes:
            declared, code_and_reason = Status.SUPPORTED, ("", "")
            if dtype not in context.facts.capabilities:
                declared, code_and_reason = (
                    Status.UNSUPPORTED,
                    ("dtype_missing", f"the platform does not support {dtype} on this device"),
                )
            elif unbuilt is not None:
                declared, code_and_reason = Status.PLANNED, (NOT_IMPLEMENTED, unbuilt)
            elif implemented is None:
                declared = Status.UNKNOWN
            elif dtype not in implemented.get(op.name, ()):
                text = f"platform {context.manifest.name} has no implementation of it"
                declared, code_and_reason = Status.UNSUPPORTED, ("no_implementation", text)
            yield context.record("op", f"{op.name}/{dtype}", (declared, Status.SUPPORTED), code_and_reason)

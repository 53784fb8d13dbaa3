"""Records of models, endpoints, ops, and pairs of arguments that depend on each other.

    model:ARCHITECTURE/FORMAT      the native architectures, and all others through transformers
    endpoint:METHOD PATH           the routes of the HTTP server
    op:NAME/DTYPE                  the ops of the kernel contracts, and which of them each platform's package implements
    pair:ARGUMENT+ARGUMENT         dependencies by constraints and backends (`srv_matrix.pairs`)

All are judged as a launch is: by resolution, constraints and the checks of backends. This module writes no page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from srv.models.architectures.architecture import PooledConfig
from srv.models.architectures.registry import BUILT_IN, find, native_config
from srv.models.config.described import described
from srv.models.config.layer_fields import encoder_groups
from srv.models.layers.rope_config import UnsupportedConfig
from srv.platform.manifest import Manifest
from srv.specs import ModelFacts
from srv_matrix.inventory import Inventory
from srv_matrix.judge import model_verdict, verdict
from srv_matrix.pairs import pairs
from srv_matrix.records import Record, Status
from srv_matrix.sample import LAYERS
from srv_matrix.variant_context import VariantContext, make_variant_context

NOT_IMPLEMENTED = "not_implemented"  # the reason code of a platform without device code
OTHERS = "any other decoder"
# Fields of configurations that transformers has no default for.
UNSTATED: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(LAYERS)]
    },
    "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27]},
}
CHECKED = "served only if logits do not depend on how the prompt is split, which is tested when the model is loaded"


def features(manifests: Iterable[Manifest], models: Sequence[ModelFacts], inventory: Inventory) -> tuple[Record, ...]:
    """All records that are not of arguments, by kind, then by platform."""
    contexts = [
        make_variant_context(manifest, variant, models[0]) for manifest in manifests for variant in manifest.variants
    ]
    found = [
        *(record for context in contexts for record in _models(context, models, inventory)),
        *(record for context in contexts for record in _endpoints(context, inventory)),
        *(record for context in contexts for record in _ops(context, inventory)),
        *(record for context in contexts for record in pairs(context)),
    ]
    return tuple(found)


def without_device_code(records: Iterable[Record], unbuilt: Mapping[str, str]) -> Iterator[Record]:
    """The records, with whatever works on a platform that cannot start as planned. `unbuilt`: as in `Inventory`."""
    for each in records:
        if each.platform in unbuilt and each.declared.works:
            yield replace(
                each,
                declared=Status.PLANNED,
                reason_code=NOT_IMPLEMENTED,
                reason=unbuilt[each.platform],
                base=None,
                values=(),
            )
        else:
            yield each


# ---- models


def _models(context: VariantContext, models: Sequence[ModelFacts], inventory: Inventory) -> Iterator[Record]:
    """Native architectures in each of their formats, then all others through transformers."""
    unbuilt = inventory.unbuilt.get(context.manifest.name)
    safetensors = next(model for model in models if model.format == "safetensors")
    gguf = next((model for model in models if model.format == "gguf"), None)
    for architecture in BUILT_IN:
        yield _model(context, architecture, safetensors, unbuilt)
        facts = find(architecture)
        if gguf is not None and facts is not None and facts.gguf is not None:
            yield _model(context, architecture, gguf, unbuilt)
    judged = verdict("model_impl", "transformers", [safetensors], (context.manifest, context.device))
    declared = Status.SUPPORTED if judged.accepted else Status.UNSUPPORTED
    code_and_reason = ("checked_at_load", CHECKED) if judged.accepted else (judged.code, judged.reason)
    if judged.accepted and unbuilt is not None:
        declared, code_and_reason = Status.PLANNED, (NOT_IMPLEMENTED, unbuilt)
    yield context.record("model", f"{OTHERS}/safetensors", (declared, Status.LIMITED), code_and_reason)


def _model(context: VariantContext, architecture: str, like: ModelFacts, unbuilt: str | None) -> Record:
    """One architecture with the sizes of a sample model, judged with the defaults of all arguments."""
    config: dict[str, Any] = {
        "hidden_size": like.hidden_size,
        "intermediate_size": like.config["intermediate_size"],
        "num_hidden_layers": like.layers,
        "num_attention_heads": like.heads,
        "num_key_value_heads": like.kv_heads,
        "vocab_size": like.vocab_size,
        "max_position_embeddings": like.context_length,
        **UNSTATED.get(architecture, {}),
    }
    facts = (Status.SUPPORTED, Status.SUPPORTED)
    code_and_reason = ("", "")
    model = replace(like, architecture=architecture, config=config)
    try:
        native = native_config(architecture, config)
        described_groups = described(architecture, config, like.dtype).cache_groups(like.context_length)
        groups = encoder_groups(native.attention_layers) or described_groups or like.cache_groups
        layer = next(iter(native.attention_layers))
        model = replace(
            model,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            generates=not isinstance(native, PooledConfig),
            cache_groups=groups,
        )
    except UnsupportedConfig as error:
        facts, code_and_reason = (Status.SUPPORTED, Status.UNSUPPORTED), ("unsupported_config", str(error))
    judged = model_verdict(model, context.manifest, context.device)
    if not judged.accepted:
        facts, code_and_reason = (Status.UNSUPPORTED, facts[1]), (judged.code, judged.reason)
    elif unbuilt is not None:
        facts, code_and_reason = (Status.PLANNED, facts[1]), (NOT_IMPLEMENTED, unbuilt)
    return context.record("model", f"{architecture}/{like.format}", facts, code_and_reason)


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


def _ops(context: VariantContext, inventory: Inventory) -> Iterator[Record]:
    implemented = inventory.implemented.get(f"{context.manifest.name}:{context.variant}", {})
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
            elif dtype not in implemented.get(op.name, ()):
                text = f"platform {context.manifest.name} has no implementation of it"
                declared, code_and_reason = Status.UNSUPPORTED, ("no_implementation", text)
            yield context.record("op", f"{op.name}/{dtype}", (declared, Status.SUPPORTED), code_and_reason)

"""Builds a model that is ready to compute: the layers that `srv.models.choice` chose, with the checkpoint's weights.

Must not know platforms beyond the ops that it receives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from srv.errors import InternalError, ModelError
from srv.models.base import CausalLM, NativeModel, inference_ready
from srv.models.checkpoints.dummy import load_dummy
from srv.models.checkpoints.filling import Progress
from srv.models.checkpoints.gguf_loader import load_gguf
from srv.models.checkpoints.reading import MAPPED, Reading
from srv.models.checkpoints.rule_storage import DequantizedStorage, QuantizedTensors, RuleStorage
from srv.models.checkpoints.safetensors_header import forget_headers
from srv.models.checkpoints.safetensors_loader import load_safetensors
from srv.models.checkpoints.source_loader import load_from_sources
from srv.models.checkpoints.stacked_experts import StackedExpertStorage
from srv.models.checkpoints.storage import StorageFormat
from srv.models.choice import FROM_LOADERS, LayerChoice, LayerOptions, choose_layers
from srv.models.facts.checkpoint_tensors import checkpoint_tensors
from srv.models.facts.gguf_rules import gguf_rules
from srv.models.facts.layer_names import layer_names
from srv.models.facts.weight_rules import fused_mapping, sized_rules
from srv.models.families.registry import BUILT_IN, find, gguf_layout
from srv.models.families.third_party import ARCHITECTURES
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.fused_factory import FusedLayerFactory
from srv.models.unsupported import UnsupportedConfig
from srv.quantization.load_method import make_factory, make_storage
from srv.quantization.method import StoredModel
from srv.specs import AttentionLayer, ModelFacts

log = logging.getLogger(__name__)


def build(
    facts: ModelFacts,
    options: LayerOptions,
    context: BuildContext,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    check_layers: Callable[[Sequence[AttentionLayer]], None] = lambda layers: None,
    reading: Reading = MAPPED,
    context_length: int | None = None,
) -> CausalLM:
    """Make the model, load its weights in the dtype and onto the device of `context`, and freeze it.

    `seed`: of random weights. `progress(total, done, name)` counts stored bytes. `check_layers(layers)` gets the
    attention layers before weights are read, as far as the class in transformers shows them then, and raises an error
    to refuse them. `reading`: for native layers. `context_length`: of the longest sequence that is going to be
    computed, in tokens; None is the model's own. Raises ModelError (its code gives the reason), and PluginError if the
    platform lacks an op.
    """
    length = context_length or facts.context_length
    choice = choose_layers(facts, options._replace(ranks=context.group.size))
    if choice.tree is None:
        log.info("%s is served through transformers: %s", facts.name, choice.fallback)
        from srv.models.transformers.hf_model import build_hf
        from srv.models.transformers.hf_output import keep_float32

        wrapped = build_hf(facts, choice, context, seed, progress, check_layers, length, reading)
        keep_float32(wrapped.model, context)
        return inference_ready(wrapped)
    model, storage = native_layers(facts, choice, context, length)
    check_layers(model.attention_layers)
    with torch.no_grad():
        _load(facts, choice.load_format, model, seed, progress, storage, reading, options.loaders)
        forget_headers()
        unsupported = model.validate_loaded()
        model.prepare_loaded()
    if unsupported is not None:
        raise ModelError("unsupported_quantization", facts.path, unsupported, "Quantize the model again")
    return inference_ready(model)


def native_layers(
    facts: ModelFacts, choice: LayerChoice, context: BuildContext, context_length: int
) -> tuple[NativeModel, StorageFormat]:
    """The native layers of a model, with uninitialised weights, and how its checkpoint stores these.

    `context_length`: as in `build`. Raises ModelError and PluginError like `build`.
    """
    if choice.tree is None:
        raise InternalError(f"{facts.architecture} has no native layers")
    factory, storage, quantized = LayerFactory(context), StorageFormat(), None
    if choice.method is not None:
        stored = StoredModel(facts, {}) if choice.load_format == FROM_LOADERS else checkpoint_tensors(facts)
        factory, storage = make_factory(choice.method, context, stored), make_storage(choice.method, stored)
        mapping = fused_mapping(facts, choice.method)
        if mapping is not None:
            factory = FusedLayerFactory(factory, mapping)
            block = 1 if choice.method.row_block is None else choice.method.row_block(facts)
            quantized = QuantizedTensors(choice.method.row_tensors, block, stored.types, facts.path)
    rules = sized_rules(facts, choice.tree)
    if choice.dequantized is not None:
        stored = checkpoint_tensors(facts)
        storage = make_storage(choice.dequantized, stored._replace(dequantize=True))
        if rules is not None:
            storage = DequantizedStorage(storage, RuleStorage(rules, StorageFormat(), stored_types=stored.types))
    elif rules is not None:
        storage = RuleStorage(rules, storage, quantized)
    storage = StackedExpertStorage(storage, "" if rules is None else rules.mapping.expert_columns)
    return load_layers(facts.architecture)(choice.tree, factory, context_length), storage


def _load(
    facts: ModelFacts,
    load_format: str,
    model: NativeModel,
    seed: int,
    progress: Progress | None,
    storage: StorageFormat,
    reading: Reading,
    loaders: Sequence[str],
) -> None:
    weight_views, slices = model.weight_views(), model.weight_slices()
    if load_format == "dummy":
        load_dummy(weight_views, seed, progress, slices)
    elif load_format == "gguf":
        load_gguf(facts, gguf_layout(facts.architecture), gguf_rules(facts), weight_views, progress, slices, reading)
    elif load_format == FROM_LOADERS:
        rename = layer_names(facts.architecture, facts.text_part_of)
        load_from_sources(loaders, facts, weight_views, progress, storage, slices, rename)
    else:
        rename = layer_names(facts.architecture, facts.text_part_of)
        load_safetensors(Path(facts.path), weight_views, progress, storage, slices, rename, reading)


def load_layers(name: str) -> type[NativeModel]:
    """The class of the layers of a native architecture. Raises PluginError if those of a third party are faulty."""
    architecture = find(name)
    if architecture is None or architecture.layers is None:
        raise UnsupportedConfig(f"architecture {name} has no native layers")
    base: Any = NativeModel  # abstract
    layers: type[NativeModel] = ARCHITECTURES.import_class(
        name, "layers", architecture.layers, base, built_in=name in BUILT_IN
    )
    return layers

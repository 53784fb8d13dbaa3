"""Builds a model that is ready to compute from its facts: chooses the layers, the loader and the device.

Owns the choice between native layers and transformers. Must not know files, nor platforms beyond the ops it receives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from srv.dist.group import RankGroup
from srv.errors import ModelError
from srv.models.architectures.architecture import NativeConfig
from srv.models.architectures.load_layers import load_layers
from srv.models.architectures.registry import gguf_layout, native_config, native_names
from srv.models.base import CausalLM, NativeModel, inference_ready
from srv.models.formats.dummy import load_dummy
from srv.models.formats.filling import Progress
from srv.models.formats.gguf_loader import load_gguf, tensor_types
from srv.models.formats.safetensors_header import read_checkpoint
from srv.models.formats.safetensors_loader import load_safetensors
from srv.models.formats.storage import StorageFormat
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.rope_config import UnsupportedConfig
from srv.platform.interface import Communicator
from srv.platform.ops import Ops
from srv.quantization import registry as quantization_methods
from srv.quantization.load_method import make_factory, make_storage
from srv.quantization.method import QuantMethod, StoredModel
from srv.specs import AttentionLayer, ModelFacts

log = logging.getLogger(__name__)

ModelImpl = Literal["auto", "srv", "transformers"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


def build(
    facts: ModelFacts,
    *,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    model_impl: ModelImpl,
    load_format: LoadFormat,
    dequantize: bool = True,
    quantization: str | None = None,
    online_quantization: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    group: RankGroup = RankGroup(),  # noqa: B008 - immutable
    communicator: Communicator | None = None,
    cache_places: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    check_layers: Callable[[Sequence[AttentionLayer]], None] = lambda layers: None,
) -> CausalLM:
    """Make the model, load its weights in `dtype` onto `device`, and freeze it.

    `model_impl`: "srv" uses the native layers, "transformers" the class of transformers, "auto" the native layers if
    they implement everything in the configuration. `dequantize`: dequantize the weights at load if the method allows
    it. `quantization`: the method of the checkpoint; None takes it from the facts. `online_quantization`: the method by
    which an unquantized checkpoint is quantized at load. `load_format`: "auto" is the checkpoint's own; "dummy" means
    random weights from `seed`. `progress(total, done, name)` counts stored bytes. `group`: the ranks over which the
    model is sharded, of which this one loads its part. `cache_places`: as in `BuildContext`. `check_layers(layers)`
    gets the attention layers before weights are read, as far as the class in transformers shows them then, and raises
    an error to refuse them. Raises ModelError (its code gives the reason), and PluginError if the platform lacks an op.
    """
    resolved_format = _load_format(facts, load_format)
    dequantize = dequantize or resolved_format == "dummy"
    method = _method(facts, quantization, online_quantization, dequantize=dequantize)
    config = None if model_impl == "transformers" else _native_config(facts, model_impl)
    if group.size > 1 and (config is None or (method is not None and method.sharding is not None)):
        obstacle = (method and method.sharding) or "only native layers without int8 weights can"
        reason = f"it cannot be sharded over {group.size} ranks: {obstacle}"
        raise ModelError("unsupported_sharding", facts.path, reason, "Leave --tp-size at 1")
    if config is None:
        if method is not None and not method.dequantizable:
            done = "would be quantized" if method.online else "are quantized"
            when = " at load" if method.online else ""
            reason = f"its weights {done} with {method.name}{when}, which only native layers support"
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(native_names())}"
            raise ModelError("unsupported_quantization", facts.path, reason, remedy)
        from srv.models.transformers.hf_model import build_hf

        return inference_ready(
            build_hf(facts, resolved_format, device, dtype, seed, progress, cache_places, check_layers)
        )
    context = BuildContext(device, dtype, ops, group, communicator, cache_places)
    factory, storage = LayerFactory(context), StorageFormat()
    if method is not None:
        stored = StoredModel(facts, _stored_types(facts))
        factory, storage = make_factory(method, context, stored), make_storage(method, stored)
    model = load_layers(facts.architecture)(config, factory, facts.context_length)
    check_layers(model.attention_layers)
    with torch.no_grad():
        _load(facts, resolved_format, model, seed, progress, storage)
        unsupported = model.validate_loaded()
        model.prepare_loaded()
    if unsupported is not None:
        raise ModelError("unsupported_quantization", facts.path, unsupported, "Quantize the model again")
    return inference_ready(model)


def _method(facts: ModelFacts, quantization: str | None, online: str | None, *, dequantize: bool) -> QuantMethod | None:
    """The method by which the layers hold their weights; None for unquantized layers.

    Raises ModelError if `srv` has no such method, or if weights that are quantized already would be quantized again.
    """
    method = quantization_methods.method_of(facts)
    stored = facts.quantization or quantization or (None if method is None else method.name)
    if online and (stored is not None or facts.stored_types.get("int8")):
        reason = f"its weights are quantized already ({stored or 'int8'}), but {online} needs unquantized ones"
        remedy = "Leave out --torchao-config, or use the checkpoint in full precision"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    if stored is not None and quantization_methods.find(quantization or stored) is None:
        detail = quantization_methods.unsupported_form(Path(facts.path), facts.config)
        reason = f"its weights are quantized with {quantization or stored}, which srv does not load yet"
        reason += f" in this form: {detail}" if detail else ""
        methods = " or ".join(quantization_methods.detectable_names())
        remedy = f"Use the checkpoint in full precision, a GGUF, or one of {methods}"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    return quantization_methods.chosen(facts, quantization, online, dequantize=dequantize)


def _stored_types(facts: ModelFacts) -> dict[str, str]:
    """The dtype (in GGUF files the type) of each stored tensor, by its Hugging Face name."""
    if facts.format == "gguf":
        return tensor_types(Path(facts.path), gguf_layout(facts.architecture))
    checkpoint = read_checkpoint(Path(facts.path))
    return {} if checkpoint is None else {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}


def _load(
    facts: ModelFacts,
    load_format: str,
    model: NativeModel,
    seed: int,
    progress: Progress | None,
    storage: StorageFormat,
) -> None:
    weight_views, slices = model.weight_views(), model.weight_slices()
    if load_format == "dummy":
        load_dummy(weight_views, seed, progress, slices)
    elif load_format == "gguf":
        load_gguf(facts, gguf_layout(facts.architecture), weight_views, progress, slices)
    else:
        load_safetensors(Path(facts.path), weight_views, progress, storage, slices)


def _load_format(facts: ModelFacts, requested: LoadFormat) -> str:
    if requested == "dummy":
        return requested
    if facts.format == "config":
        remedy = "Download the weights, or use --load-format dummy for random ones"
        raise ModelError("no_weights", facts.path, "the folder has a configuration but no weights", remedy)
    if requested not in ("auto", facts.format):
        remedy = f"Leave out --load-format, or set it to {facts.format}"
        raise ModelError("wrong_format", facts.path, f"it is {facts.format}, not {requested} as requested", remedy)
    return facts.format


def _native_config(facts: ModelFacts, requested: ModelImpl) -> NativeConfig | None:
    """The native configuration. None if "auto" falls back to transformers, which is logged."""
    try:
        return native_config(facts.architecture, facts.config)
    except UnsupportedConfig as error:
        if requested == "srv":
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(native_names())}"
            raise ModelError("unsupported_config", facts.path, str(error), remedy) from error
        log.info("%s is served through transformers: %s", facts.name, error)
        return None
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its configuration lacks a field or has an invalid value ({error!r})"
        raise ModelError("unsupported_config", facts.path, reason, "Compare config.json with the original") from error

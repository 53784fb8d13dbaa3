"""Builds a model that is ready to compute from its facts: chooses the layers, the loader and the device.

Owns the choice between native layers and transformers. Must not know files, nor platforms beyond the ops it receives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

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
from srv.models.formats.safetensors_loader import load_safetensors
from srv.models.formats.storage import StorageFormat
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.layers.rope_config import UnsupportedConfig
from srv.platform.interface import Communicator
from srv.platform.ops import Ops
from srv.quantization import modelslim
from srv.quantization import w8a8_int8 as int8
from srv.quantization.gguf_layers import GGUFLayerFactory
from srv.quantization.int8_layers import (
    DynamicInt8Linear,
    OnlineInt8LayerFactory,
    QuantizedLayerFactory,
    ScaledInt8Linear,
    WeightOnlyInt8Linear,
)
from srv.quantization.storage import Int8StorageFormat, ModelslimStorageFormat, OnlineInt8StorageFormat
from srv.specs import ModelFacts

log = logging.getLogger(__name__)

ModelImpl = Literal["auto", "srv", "transformers"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
MakeFactory: TypeAlias = Callable[[BuildContext], LayerFactory]
# The methods of online quantization, by the values of `--torchao-config`.
ONLINE_METHODS: Mapping[str, type[ScaledInt8Linear]] = MappingProxyType(
    {"int8dq": DynamicInt8Linear, "int8wo": WeightOnlyInt8Linear}
)


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
) -> CausalLM:
    """Make the model, load its weights in `dtype` onto `device`, and freeze it.

    `model_impl`: "srv" uses the native layers, "transformers" the class of transformers, "auto" the native layers if
    they implement everything in the configuration. `dequantize`: dequantize the matrices of a GGUF file at load.
    `quantization`: the method of the checkpoint; None takes it from the facts. `online_quantization`: the method by
    which an unquantized checkpoint is quantized at load, one of `ONLINE_METHODS`. `load_format`: "auto" is the
    checkpoint's own; "dummy" means random weights from `seed`. `progress(total, done, name)` counts stored bytes.
    `group`: the ranks over which the model is sharded, of which this one loads its part. `cache_places`: as in
    `BuildContext`. Raises ModelError (its code
    gives the reason), and PluginError if the platform lacks an op.
    """
    resolved_format = _load_format(facts, load_format)
    if online_quantization:
        scheme: _Scheme | None = _online_scheme(facts, quantization, online_quantization)
    else:
        scheme = _checkpoint_scheme(facts, quantization or facts.quantization)
    config = None if model_impl == "transformers" else _native_config(facts, model_impl)
    if group.size > 1 and (config is None or scheme is not None):
        reason = f"it cannot be sharded over {group.size} ranks: only native layers without int8 weights can"
        raise ModelError("unsupported_sharding", facts.path, reason, "Leave --tp-size at 1")
    if config is None:
        if scheme is not None:
            reason = f"its weights {scheme.clause}, which only native layers support"
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(native_names())}"
            raise ModelError("unsupported_quantization", facts.path, reason, remedy)
        from srv.models.transformers.hf_model import build_hf

        return inference_ready(build_hf(facts, resolved_format, device, dtype, seed, progress, cache_places))
    context = BuildContext(device, dtype, ops, group, communicator, cache_places)
    factory = LayerFactory(context)
    if scheme is not None:
        factory = scheme.make_factory(context)
    elif resolved_format == "gguf" and not dequantize:
        factory = GGUFLayerFactory(context, tensor_types(Path(facts.path), gguf_layout(facts.architecture)))
    model = load_layers(facts.architecture)(config, factory, facts.context_length)
    with torch.no_grad():
        _load(facts, resolved_format, model, seed, progress, scheme.storage if scheme else None)
        unsupported = model.validate_loaded()
        model.prepare_loaded()
    if unsupported is not None:
        raise ModelError("unsupported_quantization", facts.path, unsupported, "Quantize the model again")
    return inference_ready(model)


class _Scheme(NamedTuple):
    """How int8 layers are made and filled. `clause` completes a sentence that begins with "its weights"."""

    make_factory: MakeFactory
    storage: StorageFormat
    clause: str


def _checkpoint_scheme(facts: ModelFacts, method: str | None) -> _Scheme | None:
    """The scheme of an int8 checkpoint; None for GGUF files (whose tensors have types) and unquantized checkpoints."""
    if method is None or method.partition(":")[0] == "gguf":
        return None
    clause = f"are quantized with {method}"
    if method == modelslim.NAME:
        description = modelslim.read_description(Path(facts.path), facts.config)
        if description is None:
            return None
        return _Scheme(_factory_of(description, offsets=True), ModelslimStorageFormat(description), clause)
    if method == int8.NAME:
        description = int8.read_description(Path(facts.path), facts.config, facts.layers)
        return _Scheme(_factory_of(description, offsets=False), Int8StorageFormat(), clause)
    config = facts.config.get("quantization_config")
    detail = None
    if method == int8.COMPRESSED_TENSORS and isinstance(config, Mapping):
        detail = int8.unsupported_reason(config)
    reason = f"its weights {clause}, which srv does not load yet" + (f" in this form: {detail}" if detail else "")
    remedy = f"Use the checkpoint in full precision, a GGUF, or one of {modelslim.NAME} or {int8.NAME}"
    raise ModelError("unsupported_quantization", facts.path, reason, remedy)


def _factory_of(description: modelslim.QuantDescription, *, offsets: bool) -> MakeFactory:
    return lambda context: QuantizedLayerFactory(context, description, offsets=offsets)


def _online_scheme(facts: ModelFacts, quantization: str | None, method: str) -> _Scheme:
    """The scheme of an unquantized checkpoint that is quantized at load."""
    stored = facts.quantization or quantization or (facts.format if facts.format == "gguf" else None)
    if stored is not None or facts.int8_params:
        reason = f"its weights are quantized already ({stored or 'int8'}), but {method} needs unquantized ones"
        remedy = "Leave out --torchao-config, or use the checkpoint in full precision"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    layer_class = ONLINE_METHODS[method]
    return _Scheme(
        lambda context: OnlineInt8LayerFactory(context, layer_class),
        OnlineInt8StorageFormat(),
        f"would be quantized with {method} at load",
    )


def _load(
    facts: ModelFacts,
    load_format: str,
    model: NativeModel,
    seed: int,
    progress: Progress | None,
    storage: StorageFormat | None,
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
    config = dict(facts.config)
    if facts.quantization in (modelslim.NAME, int8.NAME):
        config.pop("quantization_config", None)  # the layer factory handles it
    try:
        return native_config(facts.architecture, config)
    except UnsupportedConfig as error:
        if requested == "srv":
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(native_names())}"
            raise ModelError("unsupported_config", facts.path, str(error), remedy) from error
        log.info("%s is served through transformers: %s", facts.name, error)
        return None
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its configuration lacks a field or has an invalid value ({error!r})"
        raise ModelError("unsupported_config", facts.path, reason, "Compare config.json with the original") from error

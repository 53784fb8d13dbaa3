"""From facts to a model that is ready to compute: which layers, which loader, which device.

Owns the choice between native layers and transformers. Must not know files or platforms beyond the ops it is
given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import torch

from srv.errors import ModelError
from srv.models import int8, modelslim
from srv.models.base import CausalLM, Progress, inference_ready
from srv.models.blocks import BlockWeights
from srv.models.decoder import Decoder
from srv.models.decoder_config import NATIVE, DecoderConfig, decoder_config
from srv.models.facts import ModelFacts
from srv.models.layers import Place, Weights
from srv.models.loaders.dummy import load_dummy
from srv.models.loaders.gguf import load_gguf, stored_types
from srv.models.loaders.safetensors import load_safetensors
from srv.models.quantized import (
    DescribedWeights,
    DynamicInt8Linear,
    RoundedWeights,
    ScaledInt8Linear,
    WeightOnlyInt8Linear,
)
from srv.models.rope_config import UnsupportedConfig
from srv.models.storage import Int8Storage, ModelslimStorage, RoundedStorage, Storage
from srv.platform.ops import Ops

log = logging.getLogger(__name__)

ModelImpl = Literal["auto", "srv", "transformers"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
MakeWeights: TypeAlias = Callable[[Place], Weights]
# What plain weights can be made as they are loaded, by the words of `--torchao-config`.
ROUNDED: Mapping[str, type[ScaledInt8Linear]] = MappingProxyType(
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
    rounding: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CausalLM:
    """Make the model, load its weights in `dtype` onto `device`, and freeze it.

    `model_impl`: "srv" takes the native layers, "transformers" its class, "auto" the native layers where they
    do all that the configuration asks for. `dequantize`: matrices in a GGUF file's blocks become plain numbers as
    they are loaded. `quantization`: how weights are stored; None: as the facts say. `rounding`: what plain weights
    become as they are loaded, one of `ROUNDED`. `load_format`: "auto" is the checkpoint's own; "dummy" random
    numbers from `seed`. `progress(total, done, name)` counts stored bytes.
    Raises ModelError (its code says why) and PluginError where the platform lacks an op.
    """
    chosen = _load_format(facts, load_format)
    scheme = (
        _rounding(facts, quantization, rounding) if rounding else _scheme(facts, quantization or facts.quantization)
    )
    config = None if model_impl == "transformers" else _native(facts, model_impl)
    if config is None:
        if scheme is not None:
            reason = f"its weights {scheme.told}, which native layers alone multiply"
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(NATIVE)}"
            raise ModelError("unsupported_quantization", facts.path, reason, remedy)
        from srv.models.hf_model import build_hf

        return inference_ready(build_hf(facts, chosen, device, dtype, seed, progress))
    place = Place(device, dtype, ops)
    weights = Weights(place)
    if scheme is not None:
        weights = scheme.weights(place)
    elif chosen == "gguf" and not dequantize:
        weights = BlockWeights(place, stored_types(Path(facts.path)))
    model = Decoder(config, weights, facts.context_length)
    with torch.no_grad():
        _load(facts, chosen, model.targets(), seed, progress, scheme.storage if scheme else None)
        against = model.settle()
    if against is not None:
        raise ModelError("unsupported_quantization", facts.path, against, "Quantize the model again")
    return inference_ready(model)


class _Scheme(NamedTuple):
    """How layers of 8-bit integers are made and filled. `told` completes "its weights ..."."""

    weights: MakeWeights
    storage: Storage
    told: str


def _scheme(facts: ModelFacts, method: str | None) -> _Scheme | None:
    """How a quantized checkpoint stores its layers; None if all are plain numbers, or their file says it itself."""
    if method is None or method.partition(":")[0] == "gguf":
        return None
    told = f"are quantized with {method}"
    if method == modelslim.NAME:
        described = modelslim.read_description(Path(facts.path), facts.config)
        if described is None:
            return None
        return _Scheme(
            lambda place: DescribedWeights(place, described, offsets=True), ModelslimStorage(described), told
        )
    if method == int8.NAME:
        kinds = int8.read_description(Path(facts.path), facts.config, facts.layers)
        return _Scheme(lambda place: DescribedWeights(place, kinds, offsets=False), Int8Storage(), told)
    config = facts.config.get("quantization_config")
    because = int8.against(config) if method == int8.COMPRESSED and isinstance(config, Mapping) else None
    reason = f"its weights {told}, which srv does not load yet" + (f" in this form: {because}" if because else "")
    remedy = f"Use the checkpoint in full precision, a GGUF, or one of {modelslim.NAME} or {int8.NAME}"
    raise ModelError("unsupported_quantization", facts.path, reason, remedy)


def _rounding(facts: ModelFacts, quantization: str | None, rounding: str) -> _Scheme:
    """Plain weights made 8-bit integers as they are loaded."""
    stored = facts.quantization or quantization or (facts.format if facts.format == "gguf" else None)
    if stored is not None or facts.in_integers:
        reason = f"its weights are stored with {stored or 'integers'}, and {rounding} rounds plain numbers"
        remedy = "Leave out --torchao-config, or use the checkpoint in full precision"
        raise ModelError("unsupported_quantization", facts.path, reason, remedy)
    kind = ROUNDED[rounding]
    return _Scheme(lambda place: RoundedWeights(place, kind), RoundedStorage(), f"are to become {rounding}")


def _load(
    facts: ModelFacts,
    load_format: str,
    targets: dict[str, torch.Tensor],
    seed: int,
    progress: Progress | None,
    storage: Storage | None,
) -> None:
    if load_format == "dummy":
        load_dummy(targets, seed, progress)
    elif load_format == "gguf":
        load_gguf(facts, targets, progress)
    else:
        load_safetensors(Path(facts.path), targets, progress, storage)


def _load_format(facts: ModelFacts, asked: LoadFormat) -> str:
    if asked == "dummy":
        return asked
    if facts.format == "config":
        remedy = "Fetch the weights, or give --load-format dummy for random ones"
        raise ModelError("no_weights", facts.path, "the folder has a configuration and no weights", remedy)
    if asked not in ("auto", facts.format):
        remedy = f"Leave out --load-format, or give {facts.format}"
        raise ModelError("wrong_format", facts.path, f"it is {facts.format}, not {asked} as asked for", remedy)
    return facts.format


def _native(facts: ModelFacts, asked: ModelImpl) -> DecoderConfig | None:
    """The native configuration, or None where "auto" goes to transformers, which the log says."""
    config = dict(facts.config)
    if facts.quantization in (modelslim.NAME, int8.NAME):
        config.pop("quantization_config", None)  # its layers are made by their description
    try:
        return decoder_config(facts.architecture, config)
    except UnsupportedConfig as error:
        if asked == "srv":
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(NATIVE)}"
            raise ModelError("unsupported_config", facts.path, str(error), remedy) from error
        log.info("%s is served through transformers: %s", facts.name, error)
        return None
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its configuration lacks a field or holds one that makes no sense ({error!r})"
        raise ModelError("unsupported_config", facts.path, reason, "Compare config.json with the original") from error

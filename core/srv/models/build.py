"""From facts to a model that is ready to compute: which layers, which loader, which device.

Owns the choice between native layers and transformers. Must not know files or platforms beyond the ops it is
given.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

from srv.errors import ModelError
from srv.models import modelslim
from srv.models.base import CausalLM, Progress, inference_ready
from srv.models.blocks import BlockWeights
from srv.models.decoder import Decoder
from srv.models.decoder_config import NATIVE, DecoderConfig, decoder_config
from srv.models.facts import ModelFacts
from srv.models.layers import Place, Weights
from srv.models.loaders.dummy import load_dummy
from srv.models.loaders.gguf import load_gguf, stored_types
from srv.models.loaders.safetensors import load_safetensors
from srv.models.modelslim import Description
from srv.models.quantized import ModelslimWeights
from srv.models.rope_config import UnsupportedConfig
from srv.platform.ops import Ops

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
    seed: int = 0,
    progress: Progress | None = None,
) -> CausalLM:
    """Make the model, load its weights in `dtype` onto `device`, and freeze it.

    `model_impl`: "srv" takes the native layers, "transformers" its class, "auto" the native layers where they
    do all that the configuration asks for. `dequantize`: matrices in a GGUF file's blocks become plain numbers as
    they are loaded. `load_format`: "auto" is the checkpoint's own; "dummy" random
    numbers from `seed`. `progress(total, done, name)` counts stored bytes.
    Raises ModelError (its code says why) and PluginError where the platform lacks an op.
    """
    chosen = _load_format(facts, load_format)
    description = _description(facts)
    config = None if model_impl == "transformers" else _native(facts, model_impl)
    if config is None:
        if description is not None:
            reason = f"its weights are quantized with {modelslim.NAME}, which native layers alone multiply"
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(NATIVE)}"
            raise ModelError("unsupported_quantization", facts.path, reason, remedy)
        from srv.models.hf_model import build_hf

        return inference_ready(build_hf(facts, chosen, device, dtype, seed, progress))
    place = Place(device, dtype, ops)
    weights = Weights(place)
    if description is not None:
        weights = ModelslimWeights(place, description)
    elif chosen == "gguf" and not dequantize:
        weights = BlockWeights(place, stored_types(Path(facts.path)))
    model = Decoder(config, weights, facts.context_length)
    with torch.no_grad():
        _load(facts, chosen, model.targets(), seed, progress, description)
        against = model.settle()
    if against is not None:
        raise ModelError("unsupported_quantization", facts.path, against, "Quantize the model again")
    return inference_ready(model)


def _description(facts: ModelFacts) -> Description | None:
    """How a quantized checkpoint stores its layers; None if all are plain numbers, or their file says it itself."""
    method = facts.quantization
    if method is None or method.partition(":")[0] == "gguf":
        return None
    if method == modelslim.NAME:
        return modelslim.read_description(Path(facts.path), facts.config)
    reason = f"its weights are quantized with {method}, which srv does not load yet"
    remedy = f"Use the checkpoint in full precision, a GGUF, or one of {modelslim.NAME}"
    raise ModelError("unsupported_quantization", facts.path, reason, remedy)


def _load(
    facts: ModelFacts,
    load_format: str,
    targets: dict[str, torch.Tensor],
    seed: int,
    progress: Progress | None,
    description: Description | None,
) -> None:
    if load_format == "dummy":
        load_dummy(targets, seed, progress)
    elif load_format == "gguf":
        load_gguf(facts, targets, progress)
    else:
        load_safetensors(Path(facts.path), targets, progress, description)


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
    if facts.quantization == modelslim.NAME:
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

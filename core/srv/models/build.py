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
from srv.models.base import CausalLM, Progress, inference_ready
from srv.models.decoder import Decoder
from srv.models.decoder_config import NATIVE, DecoderConfig, decoder_config
from srv.models.facts import ModelFacts
from srv.models.layers import Place
from srv.models.loaders.dummy import load_dummy
from srv.models.loaders.gguf import load_gguf
from srv.models.loaders.safetensors import load_safetensors
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
    seed: int = 0,
    progress: Progress | None = None,
) -> CausalLM:
    """Make the model, load its weights in `dtype` onto `device`, and freeze it.

    `model_impl`: "srv" takes the native layers, "transformers" its class, "auto" the native layers where they
    do all that the configuration asks for. `load_format`: "auto" is the checkpoint's own; "dummy" random
    numbers from `seed`. `progress(total, done, name)` counts stored bytes.
    Raises ModelError (its code says why) and PluginError where the platform lacks an op.
    """
    chosen = _load_format(facts, load_format)
    if facts.quantization is not None and not facts.quantization.startswith("gguf:"):
        reason = f"its weights are quantized with {facts.quantization}, which srv does not load yet"
        raise ModelError(
            "unsupported_quantization", facts.path, reason, "Use the checkpoint in full precision, or a GGUF"
        )
    config = None if model_impl == "transformers" else _native(facts, model_impl)
    if config is None:
        from srv.models.hf_model import build_hf

        return inference_ready(build_hf(facts, chosen, device, dtype, seed, progress))
    model = Decoder(config, Place(device, dtype, ops), facts.context_length)
    targets = model.targets()
    with torch.no_grad():
        _load(facts, chosen, targets, seed, progress)
    return inference_ready(model)


def _load(
    facts: ModelFacts, load_format: str, targets: dict[str, torch.Tensor], seed: int, progress: Progress | None
) -> None:
    if load_format == "dummy":
        load_dummy(targets, seed, progress)
    elif load_format == "gguf":
        load_gguf(facts, targets, progress)
    else:
        load_safetensors(Path(facts.path), targets, progress)


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
    try:
        return decoder_config(facts.architecture, facts.config)
    except UnsupportedConfig as error:
        if asked == "srv":
            remedy = f"Leave --model-impl at auto; native layers exist for {', '.join(NATIVE)}"
            raise ModelError("unsupported_config", facts.path, str(error), remedy) from error
        log.info("%s is served through transformers: %s", facts.name, error)
        return None
    except (KeyError, TypeError, ValueError) as error:
        reason = f"its configuration lacks a field or holds one that makes no sense ({error!r})"
        raise ModelError("unsupported_config", facts.path, reason, "Compare config.json with the original") from error

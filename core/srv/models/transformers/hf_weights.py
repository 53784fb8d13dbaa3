"""Loads checkpoints into classes of transformers: as they are stored, dequantized, or beside quantized modules."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from srv.errors import InternalError, ModelError, listed
from srv.models.checkpoints.converted_tensors import converted_tensors
from srv.models.checkpoints.filling import OTHER_CHECKPOINT, Meter, Progress
from srv.models.checkpoints.reading import Reading
from srv.models.checkpoints.safetensors_header import read_checkpoint
from srv.models.checkpoints.text_names import ROTARY, TEXT_PREFIXES, text_weight_name
from srv.models.choice import LayerChoice
from srv.models.facts.checkpoint_tensors import text_tensors
from srv.models.remote_code import may_run
from srv.models.transformers.hf_attention import IMPLEMENTATION
from srv.models.transformers.hf_class import class_of, make_model
from srv.models.transformers.hf_names import ClassNames
from srv.models.transformers.hf_quantized import QuantizedModules, placeholders
from srv.quantization.load_method import make_storage
from srv.specs import ModelFacts

log = logging.getLogger(__name__)

# From the names in a vision model to those of its language model, as regular expressions.
_TEXT_NAMES = {f"^{re.escape(stored)}": own for stored, own in TEXT_PREFIXES}


def _is_of_text(facts: ModelFacts, stored: str) -> bool:
    """Whether a tensor is of the language model, and none that `srv.models.config.tensor_notes` has announced."""
    if stored.endswith(ROTARY) or (facts.text_part_of is not None and text_weight_name(stored) is None):
        return False
    checkpoint = read_checkpoint(Path(facts.path))
    return checkpoint is None or stored in checkpoint.tensors


def from_folder(facts: ModelFacts, config: Any, dtype: torch.dtype, progress: Progress | None) -> Any:
    """Load with transformers, which renames and fuses the weights of some architectures."""
    meter = Meter(facts.weight_bytes, progress)
    mapping = {} if facts.text_part_of is None else {"key_mapping": _TEXT_NAMES}
    trusted = {"trust_remote_code": may_run(facts)}
    model = _loaded(facts, class_of(facts), facts.path, config=config, dtype=dtype, **trusted, **mapping)
    meter.add(facts.weight_bytes, facts.name)
    return model


def from_quantized(
    facts: ModelFacts,
    config: Any,
    dtype: torch.dtype,
    choice: LayerChoice,
    modules: QuantizedModules,
    reading: Reading,
) -> Any:
    """Give transformers what is no quantized module's: floats, which may have been dequantized as they are read."""
    with torch.device("meta"):
        model = make_model(facts, copy.deepcopy(config))
    names, checkpoint = ClassNames(model), read_checkpoint(Path(facts.path))
    method, stored = choice.method, modules.stored
    if choice.dequantized is not None:
        method, stored = choice.dequantized, text_tensors(facts)._replace(dequantize=True)
    if checkpoint is None or method is None or stored is None:
        raise InternalError(f"{facts.name} has no quantized weights to load")
    rename = partial(text_name, facts, modules.float_name)
    with converted_tensors(checkpoint, make_storage(method, stored), rename, names.__contains__, reading) as tensors:
        given = {**tensors, **dict(placeholders(model, modules, dtype))}
        return _loaded(facts, type(model), None, config=config, dtype=dtype, state_dict=given)


def text_name(facts: ModelFacts, rename: Callable[[str], str | None], stored: str) -> str | None:
    """The name that a tensor of the language model has by `rename`; None for the parts for images and audio."""
    name = stored if facts.text_part_of is None else text_weight_name(stored)
    return None if name is None else rename(name)


def _loaded(facts: ModelFacts, made: Any, path: str | None, **options: Any) -> Any:
    """`made.from_pretrained`, without its messages. Raises ModelError for tensors that it lacks."""
    bars, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()  # `progress` is shown instead
    hf_logging.set_verbosity_error()  # its report on tensors lists every weight of the vision part
    try:
        model, report = made.from_pretrained(
            path, attn_implementation=IMPLEMENTATION, local_files_only=True, output_loading_info=True, **options
        )
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
    unused = sorted(each for each in report["unexpected_keys"] if _is_of_text(facts, each))
    if unused:
        log.warning("%s is served without %s: transformers has no such tensors", facts.name, listed(unused))
    missing, wrong = sorted(report["missing_keys"]), sorted(str(key) for key in report["mismatched_keys"])
    if missing:
        raise ModelError("missing_tensors", facts.path, f"it lacks {listed(missing)}", OTHER_CHECKPOINT)
    if wrong:
        raise ModelError("shape_mismatch", facts.path, f"shapes differ: {listed(wrong)}", OTHER_CHECKPOINT)
    return model

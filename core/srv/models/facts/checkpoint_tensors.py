"""The dtype and the shape of each tensor of a checkpoint, by its name in the layers, from its headers. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from srv.dtypes import FLOATS
from srv.models.checkpoints.expert_tensors import divisions
from srv.models.checkpoints.gguf_header import read_header
from srv.models.checkpoints.gguf_layout import weights_by_name
from srv.models.checkpoints.safetensors_header import read_checkpoint
from srv.models.checkpoints.text_names import text_weight_name
from srv.models.facts.gguf_rules import gguf_rules
from srv.models.facts.layer_names import layer_names
from srv.models.families.registry import weight_mapping
from srv.quantization.formats.fp8_weights import DTYPE as FP8
from srv.quantization.method import StoredModel
from srv.specs import ModelFacts

_TENSOR = re.compile(r"(.+?)\.(weight\.\w.*|[^.]+)")  # bitsandbytes adds suffixes to the names of weights


def checkpoint_tensors(facts: ModelFacts) -> StoredModel:
    """What the layers of a quantization method are made for. Raises ModelError if the files are damaged.

    Of a tensor that holds quantized weights of all experts, or belongs to one, it has the tensors of single experts.
    """
    path = Path(facts.path)
    if facts.format == "gguf":
        weights = weights_by_name(read_header(path), gguf_rules(facts))
        return StoredModel(facts, {name: each.type.name for name, each in weights.items()})
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        return StoredModel(facts, {})
    rename = layer_names(facts.architecture, facts.text_part_of)
    names = {name: stored for stored in checkpoint.tensors if (name := rename(stored)) is not None}
    tensors = {name: checkpoint.tensors[stored] for name, stored in names.items()}
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    renamed = {name: stored for name, stored in names.items() if name != stored}
    for name, division in divisions(
        dict(shapes), weight_mapping(facts.architecture, facts.text_part_of).expert_columns
    ):
        if types.get(division.tensor.weight, FP8) != FP8 and not division.tensor.is_part:
            continue  # what is not quantized is divided when it is loaded
        dtype = types.pop(name)
        del shapes[name]
        renamed.pop(name, None)
        types |= dict.fromkeys(division.parts, dtype)
        shapes |= dict.fromkeys(division.parts, division.shape)
        renamed |= dict.fromkeys(division.parts, names[name])
    return StoredModel(facts, types, shapes, renamed)


def text_tensors(facts: ModelFacts) -> StoredModel:
    """What safetensors files store of a language model, by its names there: no rule of an architecture is applied.

    Raises ModelError if the files are damaged.
    """
    checkpoint = read_checkpoint(Path(facts.path))
    if checkpoint is None:
        return StoredModel(facts, {})
    rename = str if facts.text_part_of is None else text_weight_name
    named = {name: stored for stored in checkpoint.tensors if (name := rename(stored)) is not None}
    tensors = {name: checkpoint.tensors[stored] for name, stored in named.items()}
    return StoredModel(
        facts,
        {name: tensor.dtype for name, tensor in tensors.items()},
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: stored for name, stored in named.items() if name != stored},
    )


def split_name(stored: str) -> tuple[str, str]:
    """The layer that a stored tensor belongs to, and what it is there."""
    found = _TENSOR.fullmatch(stored)
    return (stored, "") if found is None else (found[1], found[2])


def quantized_layers(stored: StoredModel) -> dict[str, None]:
    """The names of the layers some of whose tensors are not floats, in the order of the checkpoint."""
    return dict.fromkeys(split_name(name)[0] for name, dtype in stored.types.items() if dtype not in FLOATS)

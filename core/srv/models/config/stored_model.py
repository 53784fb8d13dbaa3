"""The dtype and the shape of each stored tensor of a checkpoint, from its headers. Torch-free."""

from __future__ import annotations

from pathlib import Path

from srv.models.architectures.registry import find, gguf_layout
from srv.models.config.stored_names import model_names
from srv.models.formats.expert_tensors import divisions
from srv.models.formats.gguf_header import read_header
from srv.models.formats.gguf_layout import weights_by_name
from srv.models.formats.safetensors_header import read_checkpoint
from srv.quantization.formats.fp8 import DTYPE as FP8
from srv.quantization.method import StoredModel
from srv.specs import ModelFacts


def stored_model(facts: ModelFacts) -> StoredModel:
    """What the layers of a quantization method are made for. Raises ModelError if the files are damaged.

    Of a tensor that holds quantized weights of all experts, or belongs to one, it has the tensors of single experts.
    """
    path = Path(facts.path)
    if facts.format == "gguf":
        weights = weights_by_name(read_header(path), gguf_layout(facts.architecture))
        return StoredModel(facts, {name: each.type.name for name, each in weights.items()})
    checkpoint = read_checkpoint(path)
    if checkpoint is None:
        return StoredModel(facts, {})
    rename = model_names(facts.architecture, facts.text_part_of)
    names = {name: stored for stored in checkpoint.tensors if (name := rename(stored)) is not None}
    tensors = {name: checkpoint.tensors[stored] for name, stored in names.items()}
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    renamed = {name: stored for name, stored in names.items() if name != stored}
    architecture = find(facts.architecture)
    layout = "" if architecture is None or architecture.weights is None else architecture.weights.fused_experts
    for name, division in divisions(dict(shapes), layout):
        if types.get(division.tensor.weight, FP8) != FP8 and not division.tensor.is_part:
            continue  # what is not quantized is divided when it is loaded
        dtype = types.pop(name)
        del shapes[name]
        renamed.pop(name, None)
        types |= dict.fromkeys(division.parts, dtype)
        shapes |= dict.fromkeys(division.parts, division.shape)
        renamed |= dict.fromkeys(division.parts, names[name])
    return StoredModel(facts, types, shapes, renamed)

"""Where stored tensors and the configuration differ, and which is served: launch and `srv plan` say it. Torch-free.

A tensor that is neither used nor listed here is refused when the weights are loaded. Must not read weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from srv.errors import listed
from srv.models.checkpoints.output_layer import has_head
from srv.models.checkpoints.safetensors_header import Checkpoint, read_checkpoint
from srv.models.checkpoints.text_names import OUTPUT_LAYER, ROTARY, is_tied, is_unread, text_weight_name
from srv.models.facts.layer_names import layer_names
from srv.models.options import TIED
from srv.specs import ModelFacts

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")


def tensor_notes(facts: ModelFacts, folder: Path) -> tuple[str, ...]:
    """A note on an output layer that is missing, or used although the configuration ties it; one per reason to ignore
    tensors; and one on an adapter beside the weights.

    `folder`: of the headers. Parts for images and audio have another note, and a copy of the embedding needs none.
    """
    others = (*_ignored_notes(facts, folder), *_adapter_notes(facts, folder))
    if facts.headless and facts.format == "config":
        without = f"config.json of {facts.name} names a class that generates text, and there are no weights"
        return (f"{without}: its modules.json makes it an embedding model, published without an output layer", *others)
    if facts.headless:
        lacking = f"config.json of {facts.name} names a class that generates text, but its weights have no output layer"
        return (f"{lacking}: it is served for embeddings", *others)
    if facts.untied:
        own = f"config.json of {facts.name} ties its output layer to the embedding, but its weights have another one"
        return (f"{own}, which is used", *others)
    return others


def _adapter_notes(facts: ModelFacts, folder: Path) -> tuple[str, ...]:
    """PEFT stores an adapter in these files, and may do so in the folder of the model."""
    files = [name for name in ADAPTER_FILES if (folder / name).is_file()]
    if not files:
        return ()
    reason = "adapters are not applied; merge it into the weights, with merge_and_unload of peft"
    return (f"{facts.name} is served without the adapter in {listed(files)}: {reason}",)


def _ignored_notes(facts: ModelFacts, folder: Path) -> tuple[str, ...]:
    checkpoint = read_checkpoint(folder) if facts.format == "safetensors" else None
    if checkpoint is None:
        return ()
    found: dict[str, list[str]] = {}
    for name, reason in _ignored(facts, checkpoint):
        found.setdefault(reason, []).append(name)
    return tuple(f"{facts.name} is served without {listed(names)}: {reason}" for reason, names in found.items())


def _ignored(facts: ModelFacts, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    rename = layer_names(facts.architecture, facts.text_part_of)
    yield from ((name, "they predict further tokens, which is not supported") for name in checkpoint.prediction)
    for stored in checkpoint.tensors:
        name = rename(stored)
        if name is None and (facts.text_part_of is None or text_weight_name(stored) is not None):
            yield stored, f"no layer of {facts.architecture} needs them"
        elif name is not None and name.endswith(ROTARY):
            yield stored, "frequencies of RoPE follow from the configuration"
        elif name is not None and is_unread(name, facts.config):
            yield stored, "these layers use the keys and values of lower layers"
        elif name is not None and name.startswith(OUTPUT_LAYER) and facts.overrides.get(TIED):
            yield stored, f"{TIED} of --json-model-override-args replaces the output layer by the embedding"


def is_uncompared(facts: ModelFacts, folder: Path) -> bool:
    """Whether a tied model stores an output layer that only its weights can tell from a copy of the embedding."""
    checkpoint = read_checkpoint(folder) if facts.format == "safetensors" else None
    if checkpoint is None or TIED in facts.overrides or not is_tied(facts.config):
        return False
    rename = layer_names(facts.architecture, facts.text_part_of)
    names: Mapping[str, str] = {each: name for each in checkpoint.tensors if (name := rename(each))}
    return has_head(names)

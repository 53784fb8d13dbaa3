"""Which stored tensors a language model needs, if a checkpoint has parts for images or audio as well. Torch-free.

Owns the names of the weights of a language model that is served alone, and the copy of a tied output layer. Must not
know architectures, whose checkpoints may have names of their own (`srv.models.checkpoints.rules`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.models.checkpoints.safetensors_header import StoredTensor, read_checkpoint

if TYPE_CHECKING:
    from srv.specs import ModelFacts

ROTARY = "rotary_emb.inv_freq"  # frequencies in old checkpoints, which are computed instead
OUTPUT_LAYER = "lm_head."
HEAD = f"{OUTPUT_LAYER}weight"
EMBEDDING = "model.embed_tokens.weight"
# The beginnings of the names of weights in models with parts for images or audio, and what they are in the language
# model. Some have the names of the language model itself. Weights with any other name are of the other parts.
TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
    ("thinker.model.", "model."),  # of Qwen-Omni, whose other parts speak
    ("thinker.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.layers.", "model.layers."),
    ("model.norm.", "model.norm."),
)
QUERIES = re.compile(r"model\.layers\.(\d+)\.self_attn\.q_proj\.")
KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def text_weight_name(stored: str) -> str | None:
    """The name that a tensor of a whole model has in its language model; None for the parts for images and audio."""
    return next((own + stored.removeprefix(prefix) for prefix, own in TEXT_PREFIXES if stored.startswith(prefix)), None)


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output layer is the embedding, so that the copy of it that some checkpoints have is not needed.

    `config`: of the language model, with the defaults of its architecture.
    """
    return bool(config.get("tie_word_embeddings"))


def is_unread(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor computes keys or values of a layer that reads those of a lower layer instead (Gemma 3n).

    Published checkpoints have them nevertheless. `config`: of the language model.
    """
    shared, layers = (int(config.get(each) or 0) for each in ("num_kv_shared_layers", "num_hidden_layers"))
    found = KEYS_AND_VALUES.match(name) if shared else None
    return found is not None and int(found[1]) >= layers - shared


def needed_tensors(facts: ModelFacts) -> Mapping[str, StoredTensor]:
    """The tensors of safetensors files that `facts` count, by their names in the language model; {} without weights."""
    checkpoint = read_checkpoint(Path(facts.path)) if facts.format == "safetensors" else None
    if checkpoint is None:
        return {}
    name = text_weight_name if facts.text_part_of is not None else str
    named = {own: tensor for stored, tensor in checkpoint.tensors.items() if (own := name(stored)) is not None}
    tied = is_tied(facts.config)
    return {own: tensor for own, tensor in named.items() if not (tied and own.startswith(OUTPUT_LAYER))}

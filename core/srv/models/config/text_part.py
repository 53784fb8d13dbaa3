"""The language model in a folder of a model with parts for images or audio: its configuration. Torch-free.

The language model is served alone. Images and audio are not served, so that weights of the parts for them are skipped.
`srv.models.families.vision_models` lists the models, `srv.models.checkpoints.text_names` has the names of weights.

    LlavaForConditionalGeneration              LlamaForCausalLM
    ├─ vision_tower, multi_modal_projector     (skipped)
    ├─ language_model.model.layers.0…    ──►   model.layers.0…
    └─ language_model.lm_head                  lm_head
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.families.registry import class_of_type, is_native, named_class, text_fields
from srv.models.families.vision_models import SAME_FOR_TEXT, TEXT_DEFAULTS, VISION_CLASSES

_THREE_AXES = ("mrope_section", "mrope_interleaved", "interleaved")
_OF_ALL = ("eos_token_id", "bos_token_id", "pad_token_id", "torch_dtype", "dtype", "quantization_config")
# What transformers fills in for sizes that a nested configuration leaves out, as those of LLaVA 1.5 do.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def vision_class(config: Mapping[str, Any]) -> str | None:
    """The class of a model with parts for images or audio whose language model can be served alone; None for others."""
    name = named_class(config)
    return name if name in VISION_CLASSES else None


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model alone, from that of the vision model.

    It is nested as `text_config`, or at the top in older checkpoints; as `llm_config` in the first form of InternVL.
    Qwen-Omni nests it within the part that generates text, beside those that speak it.
    """
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        config = {**{name: config[name] for name in _OF_ALL if name in config}, **thinker}
    nested = config.get("text_config", config.get("llm_config"))
    own = dict(nested) if isinstance(nested, Mapping) else {k: v for k, v in config.items() if k != "vision_config"}
    kind = own.get("model_type") or config.get("model_type")
    own = {**TEXT_DEFAULTS.get(str(kind), {}), **own}
    kind = SAME_FOR_TEXT.get(str(kind), kind)
    for name in _OF_ALL:
        if own.get(name) is None and config.get(name) is not None:
            own[name] = config[name]
    tied = config.get("tie_word_embeddings", own.get("tie_word_embeddings"))
    if tied is None:
        own.pop("tie_word_embeddings", None)
    else:
        own["tie_word_embeddings"] = tied
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(own.get(name), Mapping):
            own[name] = _one_axis(own[name])
    own["architectures"] = _classes(kind, own.get("architectures"))
    architecture = class_of_type(kind)
    defaults = {} if architecture is None else text_fields(architecture, {})
    return {**{name: defaults[name] for name in _SIZES if name in defaults}, **own, "model_type": kind}


def _classes(kind: Any, stated: Any) -> list[Any]:
    """The class of a language model: that of native layers, else the stated one, else one whose sizes are known."""
    name = class_of_type(kind)
    if name is not None and is_native(name):
        return [name]
    if isinstance(stated, list) and stated:
        return stated
    return [name or kind]


def _one_axis(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters without what concerns the axes of images."""
    kept = {name: value for name, value in parameters.items() if name not in _THREE_AXES}
    return {
        name: "default" if name in ("type", "rope_type") and value == "mrope" else value for name, value in kept.items()
    }

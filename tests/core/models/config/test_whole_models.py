"""Every class of transformers with parts for images or audio computes with a text what its language model alone does.

`srv.models.families.vision_models` lists the classes whose language model has native layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from every import every
from gguf_cases import CASES, DEEPSEEK
from models_small import SIZES, randomized
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto import modeling_auto

from srv.models.checkpoints.text_names import text_weight_name
from srv.models.config.text_part import text_config
from srv.models.families.registry import class_of_type, is_native
from srv.models.families.vision_models import SAME_FOR_TEXT, VISION_CLASSES

LISTED = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
AXES = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
# What a small language model needs beside the usual sizes.
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": CASES["nemotron_h"].fields,
    "glm4v_text": {"rope_parameters": HALF},
    "glm4v_moe_text": {"rope_parameters": HALF},
    "glm_ocr_text": {"rope_parameters": HALF},
    "hunyuan_vl_text": {"rope_parameters": AXES},
    "paddleocr_vl_text": {"rope_parameters": AXES},
    "qwen2_5_omni_text": {"rope_parameters": AXES, "layer_types": ["full_attention", "full_attention"]},
    "qwen3_omni_moe_text": {"rope_parameters": AXES, "num_experts": 6, "num_experts_per_tok": 3},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}
LAYER_COUNTS = ("num_hidden_layers", "depth", "encoder_layers", "num_layers")  # of the other parts
# Classes with such a language model that are not served as texts, and why.
LEFT_OUT = {
    "AyaVisionForConditionalGeneration": "does not scale logits, which its language model alone does",
    "Cohere2VisionForConditionalGeneration": "does not scale logits, which its language model alone does",
    "PaliGemmaForConditionalGeneration": "attends in both directions within a prompt",
    "Blip2ForConditionalGeneration": "computes no text without an image",
    "InstructBlipForConditionalGeneration": "computes no text without an image",
    "InstructBlipVideoForConditionalGeneration": "computes no text without an image",
    "Cosmos3OmniForConditionalGeneration": "generates videos",
    "FastVlmForConditionalGeneration": "needs a package that is not installed, so that nothing was compared",
    "PerceptionLMForConditionalGeneration": "needs a package that is not installed, so that nothing was compared",
}
# Names of published configurations, and models whose language model has no native layers.
OTHERS = {
    *("InternVLChatModel", "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"),
    "MllamaForConditionalGeneration",
    *("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel", "Qwen3OmniMoeForConditionalGeneration"),
}
# Whose class needs a package that is not installed, or whose language model has a class of its own. test_text_part.py
# compares these.
ELSEWHERE = {
    *("Gemma3nForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
}


@functools.cache
def whole_classes() -> tuple[tuple[str, str], ...]:
    """Each class in transformers around a language model with native layers, and its model type."""
    types, found = dict[str, str](), list[tuple[str, str]]()
    for listed in LISTED:
        for model_type, names in getattr(modeling_auto, listed).items():
            types.setdefault(names if isinstance(names, str) else names[0], model_type)
    for name, model_type in types.items():
        try:
            text = getattr(CONFIG_MAPPING[model_type](), "text_config", None)
        except (ImportError, KeyError, TypeError, ValueError):  # has no default, or needs a package
            text = None
        kind = getattr(text, "model_type", None)
        served = class_of_type(SAME_FOR_TEXT.get(str(kind), kind))
        if served is not None and is_native(served):
            found.append((name, model_type))
    return tuple(found)


def test_the_list_has_every_class_whose_language_model_has_native_layers() -> None:
    found = {name for name, _ in whole_classes()}
    assert found - LEFT_OUT.keys() == set(VISION_CLASSES) - OTHERS
    assert LEFT_OUT.keys() <= found


def parts_of(config: Any) -> Iterator[Any]:
    yield config
    for name in dir(config):
        part = getattr(config, name, None) if name.endswith("_config") else None
        if hasattr(part, "to_dict"):
            yield part


def whole_and_text(name: str, model_type: str) -> tuple[Any, Any]:
    """A model with a small language model and one layer in its other parts, and the language model alone."""
    config = CONFIG_MAPPING[model_type]()
    for part in parts_of(config):
        for count in (each for each in LAYER_COUNTS if isinstance(getattr(part, each, None), int)):
            setattr(part, count, 1)
    kind = config.text_config.model_type
    fields = {**SIZES, "head_dim": 8, "pad_token_id": 0, "num_hidden_layers": 2, **OWN.get(kind, {})}
    config.text_config = CONFIG_MAPPING[kind](**fields)
    alone = text_config({"text_config": {**fields, "model_type": kind}})
    own = CONFIG_MAPPING[alone.pop("model_type")](**alone)
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    whole = randomized(getattr(transformers, name)._from_config(config, **options))
    text = MODEL_FOR_CAUSAL_LM_MAPPING[type(own)]._from_config(own, **options)
    named = {name: tensor for stored, tensor in whole.state_dict().items() if (name := text_weight_name(stored))}
    text.load_state_dict(named)  # raises for a name that one of the two lacks
    return whole, text.eval()


@pytest.mark.proof(minutes=2.5)
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@every("name", [name for name in VISION_CLASSES if name not in OTHERS | ELSEWHERE])
def test_a_text_has_the_logits_of_the_language_model_alone(name: str) -> None:
    whole, text = whole_and_text(name, dict(whole_classes())[name])
    tokens = torch.randint(3, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = text(input_ids=tokens).logits
        torch.testing.assert_close(whole(input_ids=tokens).logits, logits, atol=1e-5, rtol=1e-5)
    assert logits.std() > 0.1

"""The vision models whose language model is served alone, as data. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VISION_CLASSES = (
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Language models that exist only within vision models, by the model that computes the same for text. Their rotary
# embeddings have three positions per token, which are equal where there are no images.
SAME_FOR_TEXT: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_vl": "qwen2",
        "qwen2_vl_text": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen2_5_vl_text": "qwen2",
        "qwen3_vl_text": "qwen3",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "gemma3": "gemma3_text",
    }
)

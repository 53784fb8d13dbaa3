"""The models with parts for images or audio whose language model is served alone, as data. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.models.checkpoints.rules import Rule, StackedExperts

# Every class of transformers with parts for images or audio around a language model with native layers, if it computes
# with a text what the language model alone does (a test asks them all), and other names that published configurations
# have for these classes.
VISION_CLASSES = (
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "FunAsrNanoForConditionalGeneration",
    "FuyuForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "Nemotron3_5TranscribeForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "Ovis2ForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
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
        "qwen3_vl_moe_text": "qwen3_moe",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "gemma3": "gemma3_text",
    }
)
# The defaults of language models within vision models, where those of the models that compute the same differ. That of
# Qwen3-VL divides the weights of experts by their sum, and has no field for it.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "qwen3_vl_moe_text": MappingProxyType(
            {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "max_position_embeddings": 128000,
                "rope_theta": 500000.0,
                "moe_intermediate_size": 1408,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
            }
        )
    }
)
# What the checkpoints of a vision model store otherwise than those of its language model alone.
RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {"Qwen3VLMoeForConditionalGeneration": (StackedExperts("either"),)}
)

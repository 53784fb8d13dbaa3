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
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
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
    "PaddleOCRVLForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
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
        "qwen2_5_omni_text": "qwen2",
        "qwen3_omni_moe_text": "qwen3_moe",
        "qwen3_vl_text": "qwen3",
        "qwen3_vl_moe_text": "qwen3_moe",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "gemma3": "gemma3_text",
        "glm4v_text": "glm4",
        "glm4v_moe_text": "glm4_moe",
        "glm_ocr_text": "glm4",
        "granite_docling_text": "granite",
        "kimi_vl": "deepseek_v3",  # a nested configuration without a model_type
        "hunyuan_vl": "hunyuan_v1_dense",  # published files do not nest the language model
        "hunyuan_vl_text": "hunyuan_v1_dense",
        "paddleocr_vl_text": "llama",
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
        ),
        "qwen2_5_omni_text": MappingProxyType(
            {
                "vocab_size": 152064,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
            }
        ),
        "qwen3_omni_moe_text": MappingProxyType(
            {
                "vocab_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "norm_topk_prob": True,
            }
        ),
        "glm4v_text": MappingProxyType(
            {"max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "attention_bias": True}  # the last has no field
        ),
        "glm4v_moe_text": MappingProxyType(
            {"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True}
        ),
        "glm_ocr_text": MappingProxyType(
            {
                "vocab_size": 59392,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 16,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "attention_bias": False,
            }
        ),
        "granite_docling_text": MappingProxyType(
            {
                "vocab_size": 133800,
                "hidden_size": 1024,
                "intermediate_size": 2048,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-05,
                "tie_word_embeddings": True,
                "embedding_multiplier": 12.0,
                "logits_scaling": 4.0,
                "residual_multiplier": 0.263,
                "attention_multiplier": 0.015625,
            }
        ),
        "hunyuan_vl_text": MappingProxyType({"tie_word_embeddings": True}),
        "paddleocr_vl_text": MappingProxyType(
            {
                "vocab_size": 103424,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 18,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-05,
                "tie_word_embeddings": True,
                "rope_theta": 500000.0,
            }
        ),
    }
)
# What the checkpoints of a vision model store otherwise than those of its language model alone.
RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {"Qwen3VLMoeForConditionalGeneration": (StackedExperts("either"),)}
)

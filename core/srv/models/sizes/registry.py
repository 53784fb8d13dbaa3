"""The architectures whose sizes are known, by their names, and the question for the sizes of a model. Torch-free.

A family is imported when a model needs it. Layers are another matter (`srv.models.architectures.registry`): sizes are
known of many models that `srv` cannot run, so that `srv plan` can say what they would need.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.sizes.fields import Fields
from srv.models.sizes.parts import Part, UnknownSizes


class Family(NamedTuple):
    """`model_type`: whose defaults apply. `describe`: "module:function" in this package.

    `transformers`: whether the layers of transformers can be served, if there are no native ones. `text_type`: the
    model type of a nested `text_config`.
    """

    model_type: str
    describe: str
    transformers: bool = True
    text_type: str | None = None


FACTS_ONLY = False

# Model types whose first token has the position after the id of the padding token.
COUNT_FROM_PADDING = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "AXK2ForCausalLM": Family("axk2", "mixture:axk2", FACTS_ONLY),
        "ApertusForCausalLM": Family("apertus", "dense:apertus"),
        "ArceeForCausalLM": Family("arcee", "dense:arcee"),
        "BambaForCausalLM": Family("bamba", "hybrid:bamba", FACTS_ONLY),
        "BloomForCausalLM": Family("bloom", "older:bloom", FACTS_ONLY),
        "Cohere2ForCausalLM": Family("cohere2", "dense:cohere2"),
        "CohereForCausalLM": Family("cohere", "dense:cohere"),
        "DeepseekV2ForCausalLM": Family("deepseek_v2", "mixture:deepseek_v2", FACTS_ONLY),
        "DeepseekV32ForCausalLM": Family("deepseek_v32", "mixture:deepseek_v32", FACTS_ONLY),
        "DeepseekV3ForCausalLM": Family("deepseek_v3", "mixture:deepseek_v3", FACTS_ONLY),
        "Dots1ForCausalLM": Family("dots1", "mixture:dots1"),
        "Ernie4_5ForCausalLM": Family("ernie4_5", "dense:ernie4_5"),
        "Ernie4_5_MoeForCausalLM": Family("ernie4_5_moe", "mixture:ernie4_5_moe"),
        "Exaone4ForCausalLM": Family("exaone4", "dense:exaone4"),
        "ExaoneMoeForCausalLM": Family("exaone_moe", "mixture:exaone_moe"),
        "FalconForCausalLM": Family("falcon", "older:falcon", FACTS_ONLY),
        "FalconH1ForCausalLM": Family("falcon_h1", "hybrid:falcon_h1", FACTS_ONLY),
        "GPT2LMHeadModel": Family("gpt2", "older:gpt2"),
        "GPTBigCodeForCausalLM": Family("gpt_bigcode", "older:gpt2"),
        "GPTJForCausalLM": Family("gptj", "older:gptj", FACTS_ONLY),
        "GPTNeoXForCausalLM": Family("gpt_neox", "older:gpt_neox"),
        "Gemma2ForCausalLM": Family("gemma2", "dense:gemma2"),
        "Gemma3ForCausalLM": Family("gemma3_text", "dense:gemma3"),
        "Gemma3nForCausalLM": Family("gemma3n_text", "dense:gemma3n"),
        "GemmaForCausalLM": Family("gemma", "dense:gemma"),
        "Glm4ForCausalLM": Family("glm4", "dense:glm4"),
        "Glm4MoeForCausalLM": Family("glm4_moe", "mixture:glm4_moe"),
        "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", "mixture:glm4_moe_lite"),
        "GlmForCausalLM": Family("glm", "dense:glm"),
        "GlmMoeDsaForCausalLM": Family("glm_moe_dsa", "mixture:glm_moe_dsa", FACTS_ONLY),
        "GptOssForCausalLM": Family("gpt_oss", "mixture:gpt_oss", FACTS_ONLY),
        "GraniteForCausalLM": Family("granite", "dense:llama"),
        "GraniteMoeForCausalLM": Family("granitemoe", "mixture:granite_moe"),
        "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", "hybrid:granite_hybrid", FACTS_ONLY),
        "GraniteMoeSharedForCausalLM": Family("granitemoeshared", "mixture:granite_moe"),
        "HYV4ForCausalLM": Family("hy_v4", "mixture:hy_v4", FACTS_ONLY),
        "HunYuanDenseV1ForCausalLM": Family("hunyuan_v1_dense", "dense:hunyuan"),
        "HunYuanMoEV1ForCausalLM": Family("hunyuan_v1_moe", "mixture:hunyuan_moe"),
        "Jais2ForCausalLM": Family("jais2", "dense:jais2"),
        "JambaForCausalLM": Family("jamba", "hybrid:jamba", FACTS_ONLY),
        "KimiLinearForCausalLM": Family("kimi_linear", "hybrid:kimi_linear", FACTS_ONLY),
        "Lfm2ForCausalLM": Family("lfm2", "hybrid:lfm2", FACTS_ONLY),
        "Lfm2MoeForCausalLM": Family("lfm2_moe", "hybrid:lfm2_moe", FACTS_ONLY),
        "Lfm3ForCausalLM": Family("lfm3", "hybrid:lfm3", FACTS_ONLY),
        "Llama4ForCausalLM": Family("llama4_text", "mixture:llama4", FACTS_ONLY),
        "Llama4ForConditionalGeneration": Family("llama4", "multimodal:llama4_vision", FACTS_ONLY, "llama4_text"),
        "LlamaForCausalLM": Family("llama", "dense:llama"),
        "Mamba2ForCausalLM": Family("mamba2", "hybrid:mamba2_model", FACTS_ONLY),
        "MambaForCausalLM": Family("mamba", "hybrid:mamba", FACTS_ONLY),
        "MiMoV2FlashForCausalLM": Family("mimo_v2_flash", "mixture:mimo_v2_flash"),
        "MiniCPM3ForCausalLM": Family("minicpm3", "dense:minicpm3"),
        "MiniMaxForCausalLM": Family("minimax", "hybrid:minimax", FACTS_ONLY),
        "MiniMaxM2ForCausalLM": Family("minimax_m2", "mixture:minimax_m2"),
        "Ministral3ForCausalLM": Family("ministral3", "dense:mistral"),
        "MinistralForCausalLM": Family("ministral", "dense:ministral"),
        "MistralForCausalLM": Family("mistral", "dense:mistral"),
        "MixtralForCausalLM": Family("mixtral", "mixture:mixtral"),
        "MllamaForCausalLM": Family("mllama_text_model", "dense:mllama"),
        "MptForCausalLM": Family("mpt", "older:mpt", FACTS_ONLY),
        "NemotronForCausalLM": Family("nemotron", "dense:nemotron"),
        "NemotronHForCausalLM": Family("nemotron_h", "hybrid:nemotron_h", FACTS_ONLY),
        "OPTForCausalLM": Family("opt", "older:opt"),
        "Olmo2ForCausalLM": Family("olmo2", "dense:olmo2"),
        "Olmo3ForCausalLM": Family("olmo3", "dense:olmo3"),
        "OlmoForCausalLM": Family("olmo", "dense:olmo"),
        "OlmoHybridForCausalLM": Family("olmo_hybrid", "hybrid:olmo_hybrid", FACTS_ONLY),
        "OlmoeForCausalLM": Family("olmoe", "mixture:olmoe"),
        "Phi3ForCausalLM": Family("phi3", "dense:phi3"),
        "PhiForCausalLM": Family("phi", "dense:phi"),
        "PhiMoEForCausalLM": Family("phimoe", "mixture:phimoe"),
        "Qwen2ForCausalLM": Family("qwen2", "dense:qwen2"),
        "Qwen2MoeForCausalLM": Family("qwen2_moe", "mixture:qwen2_moe"),
        "Qwen3ForCausalLM": Family("qwen3", "dense:qwen3"),
        "Qwen3MoeForCausalLM": Family("qwen3_moe", "mixture:qwen3_moe"),
        "Qwen3NextForCausalLM": Family("qwen3_next", "hybrid:qwen3_next", FACTS_ONLY),
        "Qwen3VLMoeForConditionalGeneration": Family(
            "qwen3_vl_moe", "multimodal:qwen3_vl_moe", text_type="qwen3_vl_moe_text"
        ),
        "Qwen3_5ForCausalLM": Family("qwen3_5_text", "hybrid:qwen3_5", FACTS_ONLY),
        "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", "hybrid:qwen3_5_moe", FACTS_ONLY),
        "RecurrentGemmaForCausalLM": Family("recurrent_gemma", "hybrid:recurrent_gemma", FACTS_ONLY),
        "SeedOssForCausalLM": Family("seed_oss", "dense:seed_oss"),
        "SmolLM3ForCausalLM": Family("smollm3", "dense:smollm3"),
        "StableLmForCausalLM": Family("stablelm", "dense:stablelm", FACTS_ONLY),
        "Starcoder2ForCausalLM": Family("starcoder2", "dense:starcoder2"),
        "XGLMForCausalLM": Family("xglm", "older:xglm", FACTS_ONLY),
    }
)


def describe(architecture: str, config: Mapping[str, Any], dtype_name: str = "bfloat16") -> Part:
    """The weights and caches of a model, from the fields of its config.json. `dtype_name`: of its activations.

    Raises UnknownSizes if the architecture is not known, or the configuration does not determine its sizes.
    """
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnknownSizes(f"{architecture} is an unknown architecture: no size is claimed")
    return describe_fields(family, Fields(config, family.model_type, dtype_name))


def describe_fields(family: Family, fields: Fields) -> Part:
    """The model of a family with these fields. Raises UnknownSizes for values that are no sizes."""
    module, _, name = family.describe.partition(":")
    function: Callable[[Fields], Part] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    try:
        part = function(fields)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise UnknownSizes(f"config.json has a value that is no size ({type(error).__name__}: {error})") from error
    if not isinstance(part.parameters, int) or any(min(weight.shape, default=1) < 0 for weight in part.weights):
        raise UnknownSizes("config.json has a value that is no size")
    return part

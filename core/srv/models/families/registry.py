"""All architectures that `srv` knows, by their names. Torch-free; layers are imported when a model is built.

    srv.architectures          <Hugging Face class> = package.module:ARCHITECTURE     (a third party's architecture)

The file of an architecture is imported when a model needs it, so that `srv plan` does not wait for the others, and a
faulty one does not affect them. `srv.models.families.third_party` checks those of other distributions
(docs/adr/0021-architectures.md); `srv.models.families.trees` makes their trees.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import WeightMapping
from srv.models.families.architecture import GROUP, Architecture
from srv.models.families.vision_models import RULES
from srv.models.unsupported import UnsupportedConfig
from srv.platform.installed import entries

# The module in this package, by the Hugging Face class; after a colon, the name of its architecture in a module with
# several.
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "GraniteForCausalLM": "granite",
        "SmolLM3ForCausalLM": "smollm3",
        "Gemma3ForCausalLM": "gemma3",
        "StableLmForCausalLM": "stablelm",
        "GPTJForCausalLM": "gptj",
        "FalconForCausalLM": "falcon",
        "BloomForCausalLM": "bloom",
        "MptForCausalLM": "mpt",
        "XGLMForCausalLM": "xglm",
        "Gemma2ForCausalLM": "gemma2",
        "Olmo2ForCausalLM": "olmo2",
        "Phi3ForCausalLM": "phi3",
        "GlmForCausalLM": "glm",
        "Glm4ForCausalLM": "glm4",
        "Ernie4_5ForCausalLM": "ernie4_5",
        "CohereForCausalLM": "cohere",
        "Cohere2ForCausalLM": "cohere2",
        "Starcoder2ForCausalLM": "starcoder2",
        "PhiForCausalLM": "phi",
        "GPTNeoXForCausalLM": "gpt_neox",
        "OPTForCausalLM": "opt",
        "GPT2LMHeadModel": "gpt2",
        "Glm4MoeForCausalLM": "glm4_moe",
        "Llama4ForCausalLM": "llama4",
        "GptOssForCausalLM": "gpt_oss",
        "GraniteMoeHybridForCausalLM": "granite_hybrid",
        "MiniMaxForCausalLM": "minimax",
        "BaichuanForCausalLM": "baichuan",
        "BambaForCausalLM": "bamba",
        "FalconH1ForCausalLM": "falcon_h1",
        "NemotronHForCausalLM": "nemotron_h",
        "Qwen3NextForCausalLM": "qwen3_next",
        "Qwen3_5ForCausalLM": "qwen3_5:DENSE",
        "Qwen3_5MoeForCausalLM": "qwen3_5:SPARSE",
        "Lfm2ForCausalLM": "lfm2:DENSE",
        "Lfm2MoeForCausalLM": "lfm2:SPARSE",
        "Lfm3ForCausalLM": "lfm3",
        "RecurrentGemmaForCausalLM": "recurrent_gemma",
        "OlmoHybridForCausalLM": "olmo_hybrid",
        "MixtralForCausalLM": "mixtral",
        "Qwen2MoeForCausalLM": "qwen2_moe",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "OlmoeForCausalLM": "olmoe",
        "MiniMaxM2ForCausalLM": "minimax_m2",
        "DeepseekV2ForCausalLM": "deepseek_v2",
        "DeepseekV3ForCausalLM": "deepseek_v3",
        "DeepseekV32ForCausalLM": "deepseek_v32:V32",
        "GlmMoeDsaForCausalLM": "deepseek_v32:GLM",
        "AXK2ForCausalLM": "axk2",
        "HYV4ForCausalLM": "hy_v4",
        "BertModel": "bert",
        "BertForMaskedLM": "bert:MASKED",
        "BertForSequenceClassification": "bert:CLASSIFIER",
        "RobertaModel": "roberta:ROBERTA",
        "RobertaForMaskedLM": "roberta:ROBERTA_MASKED",
        "RobertaForSequenceClassification": "roberta:ROBERTA_CLASSIFIER",
        "XLMRobertaModel": "roberta:XLM_ROBERTA",
        "XLMRobertaForMaskedLM": "roberta:XLM_ROBERTA_MASKED",
        "XLMRobertaForSequenceClassification": "roberta:XLM_ROBERTA_CLASSIFIER",
        "ModernBertModel": "modernbert",
        "ModernBertForMaskedLM": "modernbert:MASKED",
        "ModernBertForSequenceClassification": "modernbert:CLASSIFIER",
        "GteModel": "gte",
        "GteForMaskedLM": "gte:MASKED",
        "GteForSequenceClassification": "gte:CLASSIFIER",
        "NomicBertModel": "nomic_bert",
        "NomicBertForMaskedLM": "nomic_bert:MASKED",
        "NomicBertForSequenceClassification": "nomic_bert:CLASSIFIER",
        "JinaEmbeddingsV3Model": "jina_embeddings_v3",
        "JinaEmbeddingsV3ForMaskedLM": "jina_embeddings_v3:MASKED",
        "JinaEmbeddingsV3ForSequenceClassification": "jina_embeddings_v3:CLASSIFIER",
        "DistilBertModel": "distilbert",
        "DistilBertForMaskedLM": "distilbert:MASKED",
        "DistilBertForSequenceClassification": "distilbert:CLASSIFIER",
        "MPNetModel": "mpnet",
        "MPNetForMaskedLM": "mpnet:MASKED",
        "MPNetForSequenceClassification": "mpnet:CLASSIFIER",
        "EuroBertModel": "eurobert",
        "EuroBertForMaskedLM": "eurobert:MASKED",
        "EuroBertForSequenceClassification": "eurobert:CLASSIFIER",
        "LlamaModel": "pooled_decoder:LLAMA",
        "LlamaForSequenceClassification": "pooled_decoder:LLAMA_CLASSIFIER",
        "MistralModel": "pooled_decoder:MISTRAL",
        "MistralForSequenceClassification": "pooled_decoder:MISTRAL_CLASSIFIER",
        "Qwen2Model": "pooled_decoder:QWEN2",
        "Qwen2ForSequenceClassification": "pooled_decoder:QWEN2_CLASSIFIER",
        "Qwen3Model": "pooled_decoder:QWEN3",
        "Qwen3ForSequenceClassification": "pooled_decoder:QWEN3_CLASSIFIER",
        "Gemma3TextModel": "pooled_decoder:GEMMA3",
        "Gemma3TextForSequenceClassification": "pooled_decoder:GEMMA3_CLASSIFIER",
        "ApertusForCausalLM": "apertus",
        "ArceeForCausalLM": "arcee",
        "AfmoeForCausalLM": "afmoe",
        "BailingMoeForCausalLM": "bailing_moe",
        "BailingMoeV2ForCausalLM": "bailing_moe:V2",
        "ChatGLMModel": "chatglm",
        "DbrxForCausalLM": "dbrx",
        "Dots1ForCausalLM": "dots1",
        "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
        "Exaone4ForCausalLM": "exaone",
        "ExaoneForCausalLM": "exaone3",
        "ExaoneMoeForCausalLM": "exaone_moe",
        "GPTBigCodeForCausalLM": "gpt_bigcode",
        "Gemma3nForCausalLM": "gemma3n",
        "Gemma4ForCausalLM": "gemma4:TEXT",
        "Gemma4UnifiedForCausalLM": "gemma4:UNIFIED",
        "GemmaForCausalLM": "gemma",
        "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
        "GraniteMoeForCausalLM": "granite_moe:GRANITE",
        "GraniteMoeSharedForCausalLM": "granite_moe:SHARED",
        "Grok1ForCausalLM": "grok",
        "HunYuanDenseV1ForCausalLM": "hunyuan",
        "HunYuanMoEV1ForCausalLM": "hunyuan_moe",
        "InternLM2ForCausalLM": "internlm:INTERNLM2",
        "InternLM3ForCausalLM": "internlm:INTERNLM3",
        "Jais2ForCausalLM": "nemotron:JAIS2",
        "JambaForCausalLM": "jamba",
        "KimiLinearForCausalLM": "kimi_linear",
        "Mamba2ForCausalLM": "mamba:MAMBA2",
        "MambaForCausalLM": "mamba:MAMBA",
        "MiMoForCausalLM": "mimo",
        "MiMoV2FlashForCausalLM": "mimo_v2_flash",
        "MiniCPM3ForCausalLM": "minicpm3",
        "Ministral3ForCausalLM": "ministral:MINISTRAL3",
        "MinistralForCausalLM": "ministral:MINISTRAL",
        "MllamaForCausalLM": "mllama",
        "NemotronForCausalLM": "nemotron:NEMOTRON",
        "Olmo3ForCausalLM": "olmo3",
        "OlmoForCausalLM": "olmo",
        "PersimmonForCausalLM": "persimmon",
        "PhiMoEForCausalLM": "phimoe",
        "SeedOssForCausalLM": "seed_oss",
        "SolarForCausalLM": "solar",
        "XverseForCausalLM": "xverse",
    }
)
# Architectures whose published configurations name the class of another one: by that class, the field that says so, its
# value, and the architecture.
_DISTINGUISHED: Mapping[str, tuple[str, Any, str]] = MappingProxyType(
    {"XLMRobertaModel": ("position_embedding_type", "rotary", "JinaEmbeddingsV3Model")}
)
_SUFFIX = "ForCausalLM"


def native_names() -> tuple[str, ...]:
    """The Hugging Face classes of all architectures with native layers."""
    return tuple(dict.fromkeys((*built_in_native_names(), *_third_party_names())))


@functools.cache
def built_in_native_names() -> tuple[str, ...]:
    """Likewise, of those in `srv` itself."""
    return tuple(name for name in BUILT_IN if _built_in(name).layers is not None)


def is_native(name: str) -> bool:
    """Whether an architecture has native layers. Loads nothing of other distributions."""
    return name in _third_party_names() or (name in BUILT_IN and _built_in(name).layers is not None)


def encoder_names() -> tuple[str, ...]:
    """The Hugging Face classes of encoders in `srv` itself, each without a head."""
    from srv.models.families.builders.encoders import LAYERS  # only the text of a refusal needs it

    return tuple(each.name for each in map(_built_in, BUILT_IN) if each.layers == LAYERS and each.model_type)


def find(name: str) -> Architecture | None:
    """The architecture of a Hugging Face class; None if `srv` does not know it.

    Raises PluginError if a third party's architecture of that name is faulty, or if two distributions claim the name.
    """
    if name in _third_party_names():
        from srv.models.families import third_party  # most installations do not need it

        return third_party.ARCHITECTURES.find(name, taken=name in BUILT_IN)
    return _built_in(name) if name in BUILT_IN else None


def is_known(name: str) -> bool:
    """Whether the sizes of an architecture are known."""
    return name in BUILT_IN or name in _third_party_names()


def runs_through_transformers(name: str) -> bool:
    """Whether the class of transformers can be served, as far as its architecture says; that of unknown ones may."""
    architecture = find(name)
    return architecture is None or architecture.runs_through_transformers


def find_gguf(name: object, *, experts: bool = False, marks: Collection[str] = ()) -> Architecture | None:
    """The architecture of a GGUF file, by its `general.architecture`, and whether the model has experts.

    `marks`: as of `GGUFLayout`, those of the file and others. Raises PluginError as `find` does.
    """
    mine = [each for each in map(_built_in, BUILT_IN) if each.gguf and each.gguf.name == name]
    marked = [each for each in mine if each.gguf and any(mark in marks for mark in each.gguf.marks)]
    mine = marked or [each for each in mine if each.gguf and not each.gguf.marks] or mine
    if mine:
        alike = (each for each in mine if each.gguf and each.gguf.has_experts == experts)
        return find(next(alike, mine[0]).name)
    from srv.models.families import third_party

    return third_party.find_gguf(name)


def gguf_names() -> tuple[str, ...]:
    """Every `general.architecture` of the architectures in `srv` itself."""
    return tuple(dict.fromkeys(each.gguf.name for each in map(_built_in, BUILT_IN) if each.gguf))


def gguf_layout(name: str) -> GGUFLayout:
    """The layout of the GGUF files of an architecture, which has been found by `find_gguf` before."""
    architecture = find(name)
    if architecture is None or architecture.gguf is None:
        raise UnsupportedConfig(f"GGUF files of {name} are not supported")
    return architecture.gguf


def weight_mapping(name: str, part_of: str | None = None) -> WeightMapping:
    """What the safetensors files of an architecture store otherwise than its tree; nothing of an unknown one.

    `part_of`: the class of the vision model whose language model it is; None of others.
    """
    architecture = find(name)
    own = () if architecture is None else architecture.weights
    return WeightMapping((*own, *RULES.get(part_of or "", ())))


def known_name(published: str, config: Mapping[str, Any]) -> str:
    """The name of an architecture by which `find` knows it, from the class that a configuration names."""
    field, value, name = _DISTINGUISHED.get(published, ("", None, ""))
    if field and config.get(field) == value:
        return name
    return published if published in BUILT_IN else _published_names().get(published, published)


def named_class(config: Mapping[str, Any]) -> str | None:
    """The class that a configuration names, as it stands in its file; None if it names none."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None


def class_of_type(model_type: object) -> str | None:
    """The Hugging Face class of a `model_type`, for configurations that name no class; None for an unknown one."""
    if not isinstance(model_type, str):
        return None
    return {**_types(), **{_type_of(name): name for name in _third_party_names()}}.get(model_type)


def with_defaults(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as native layers read it, with all defaults; others are unchanged: their class has defaults."""
    architecture = find(name)
    if architecture is None or architecture.layers is None:
        return dict(config)
    return architecture.with_defaults(config)


def text_fields(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model of an architecture, with the defaults of its class."""
    architecture, nested = find(name), config.get("text_config")
    inner = {**config, **nested} if isinstance(nested, Mapping) else config
    return dict(inner) if architecture is None else {**architecture.text_defaults, **architecture.with_defaults(inner)}


def field_names(name: str | None) -> Iterable[str]:
    """The names of the fields of an architecture's configuration that have defaults; () for an unknown one."""
    architecture = None if name is None else find(name)
    if architecture is None:
        return ()
    return (*architecture.text_defaults, *architecture.defaults, *architecture.names, *architecture.former_names)


def counts_from_padding(name: str, model_type: object) -> bool:
    """Whether the first token of a model has the position after the id of the padding token."""
    if name in BUILT_IN:
        return model_type in _built_in(name).types_after_padding
    return model_type in _types_after_padding()


def _third_party_names() -> tuple[str, ...]:
    return tuple(entry.name for entry in entries(GROUP))


@functools.cache
def _built_in(name: str) -> Architecture:
    module, _, attribute = BUILT_IN[name].partition(":")
    loaded = importlib.import_module(f"{__package__}.{module}")
    architecture: Architecture = getattr(loaded, attribute or "ARCHITECTURE")
    return architecture


def _type_of(name: str, model_type: str | None = None) -> str:
    return model_type or name.removesuffix(_SUFFIX).lower()


@functools.cache
def _types() -> Mapping[str, str]:
    return {_type_of(name, _built_in(name).model_type): name for name in BUILT_IN}


@functools.cache
def _published_names() -> Mapping[str, str]:
    return {other: name for name in BUILT_IN for other in _built_in(name).published_names}


@functools.cache
def _types_after_padding() -> frozenset[str]:
    return frozenset(each for name in BUILT_IN for each in _built_in(name).types_after_padding)

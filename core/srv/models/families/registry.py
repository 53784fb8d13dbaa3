"""The architectures with native layers, by their names. Torch-free; the layers are imported when a model is built.

    srv.architectures          <Hugging Face class> = package.module:ARCHITECTURE     (a third party's architecture)

The file of an architecture is imported when a model needs it, so that `srv plan` does not wait for the others, and a
faulty one does not affect them. `srv.models.families.third_party` checks those of other distributions
(docs/adr/0021-architectures.md).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from srv.kept import kept_per_object
from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import WeightMapping
from srv.models.families.architecture import GROUP, Architecture, Pooled
from srv.models.layers.rope_config import UnsupportedConfig
from srv.platform.installed import entries

if TYPE_CHECKING:
    from srv.specs import ModelFacts

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
        "BambaForCausalLM": "bamba",
        "FalconH1ForCausalLM": "falcon_h1",
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
    }
)
# Classes that published configurations name, by the name that transformers has for the same one.
_PUBLISHED_NAMES: Mapping[str, str] = MappingProxyType(
    {"MPTForCausalLM": "MptForCausalLM", "PhimoeForCausalLM": "PhiMoEForCausalLM"}
)
_SUFFIX = "ForCausalLM"


def native_names() -> tuple[str, ...]:
    """The Hugging Face classes of all architectures with native layers."""
    return tuple(dict.fromkeys((*BUILT_IN, *(entry.name for entry in entries(GROUP)))))


def encoder_names() -> tuple[str, ...]:
    """The Hugging Face classes of encoders in `srv` itself, each without a head."""
    from srv.models.families.builders.encoders import LAYERS  # only the text of a refusal needs it

    return tuple(each.name for each in map(_built_in, BUILT_IN) if each.layers == LAYERS and each.model_type)


def find(name: str) -> Architecture | None:
    """The architecture of a Hugging Face class; None if it has no native layers.

    Raises PluginError if a third party's architecture of that name is faulty, or if two distributions claim the name.
    """
    if any(entry.name == name for entry in entries(GROUP)):
        from srv.models.families import third_party  # most installations do not need it

        return third_party.ARCHITECTURES.find(name, taken=name in BUILT_IN)
    return _built_in(name) if name in BUILT_IN else None


def find_gguf(name: object, *, experts: bool = False) -> Architecture | None:
    """The architecture of a GGUF file, by its `general.architecture`, and whether the model has experts.

    Raises PluginError as `find` does.
    """
    mine = [each for each in map(_built_in, BUILT_IN) if each.gguf and each.gguf.name == name]
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


def weight_mapping(name: str) -> WeightMapping:
    """What the safetensors files of an architecture store otherwise than its layers; nothing without native layers."""
    architecture = find(name)
    return WeightMapping(() if architecture is None else architecture.weights)


def known_name(published: str) -> str:
    """The name of an architecture by which `find` knows it, from the class that a configuration names."""
    return _PUBLISHED_NAMES.get(published, published)


def name_of_type(model_type: object) -> str | None:
    """The Hugging Face class of a `model_type`, for configurations that name no class."""
    own = {name: _built_in(name).model_type for name in BUILT_IN}
    types = {own.get(name) or name.removesuffix(_SUFFIX).lower(): name for name in native_names()}
    return types.get(model_type) if isinstance(model_type, str) else None


def with_defaults(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its native architecture filled in; others are returned unchanged."""
    architecture = find(name)
    return dict(config) if architecture is None else _filled(architecture, config)


def native_tree(name: str, config: Mapping[str, Any]) -> Part:
    """The blueprint for native layers. Raises UnsupportedConfig with what they do not implement."""
    architecture = find(name)
    if architecture is None:
        raise UnsupportedConfig(f"architecture {name} has no native layers")
    filled = _filled(architecture, config)
    if name in BUILT_IN:
        return architecture.tree(filled)
    from srv.models.families import third_party

    return third_party.tree(architecture, filled)


def native_or_reason(name: str, config: Mapping[str, Any]) -> Part | str:
    """As `native_tree`; a clause that says why no native layers compute the model, also of an invalid configuration.

    A launch refuses the latter when it builds the model.
    """
    try:
        return native_tree(name, config)
    except UnsupportedConfig as error:
        return str(error)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return f"its configuration lacks a field or has an invalid value ({error!r})"


@kept_per_object
def native_tree_of(model: ModelFacts) -> Part | str:
    """As `native_or_reason`, of a model: it is asked by many, and all of them share one tree and the walks over it."""
    return native_or_reason(model.architecture, model.config)


def pooled_of(name: str, config: Mapping[str, Any]) -> Pooled | None:
    """What a model with native layers says of itself that generates no text; None of the others.

    `config`: fields of which `native_tree` makes a tree.
    """
    architecture = find(name)
    if architecture is None or architecture.pooled is None:
        return None
    filled = _filled(architecture, config)
    if name in BUILT_IN:
        return architecture.pooled(filled)
    from srv.models.families import third_party

    return third_party.pooled(architecture, filled)


@functools.cache
def _built_in(name: str) -> Architecture:
    module, _, attribute = BUILT_IN[name].partition(":")
    found = importlib.import_module(f"{__package__}.{module}")
    architecture: Architecture = getattr(found, attribute or "ARCHITECTURE")
    return architecture


def _filled(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    filled = {**architecture.defaults, **config}
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = filled.get("num_attention_heads")
    return filled

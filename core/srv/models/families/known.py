"""What a model is made of, by its architecture: of native layers, or of a family whose sizes alone are known.

A family is imported when a model needs it. Sizes are known of many models that `srv` cannot run, so that `srv plan` can
say what they would need. Torch-free.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import Experts, Part
from srv.models.checkpoints.rules import WeightMapping
from srv.models.derive import distinct, parameters
from srv.models.families.family import Family, Fields, UnknownSizes
from srv.models.families.native import known_tree
from srv.models.families.registry import find, name_of_type, with_defaults
from srv.models.families.registry import weight_mapping as of_native_layers

MAX_LAYERS = 10_000  # so that a damaged file cannot cause huge allocations
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")

# Model types whose first token has the position after the id of the padding token.
COUNT_FROM_PADDING = (
    *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)

# The module in this package and the name of the family in it, by the Hugging Face class.
SIZES_ONLY: Mapping[str, str] = MappingProxyType(
    {
        "ApertusForCausalLM": "dense:APERTUS",
        "ArceeForCausalLM": "dense:ARCEE",
        "Dots1ForCausalLM": "mixture:DOTS1",
        "Ernie4_5_MoeForCausalLM": "mixture:ERNIE4_5",
        "Exaone4ForCausalLM": "dense:EXAONE4",
        "ExaoneMoeForCausalLM": "mixture:EXAONE",
        "GPTBigCodeForCausalLM": "dense:GPT_BIGCODE",
        "Gemma3nForCausalLM": "dense:GEMMA3N",
        "GemmaForCausalLM": "dense:GEMMA",
        "Glm4MoeLiteForCausalLM": "mixture:GLM4_LITE",
        "GraniteMoeForCausalLM": "mixture:GRANITE",
        "GraniteMoeSharedForCausalLM": "mixture:GRANITE_SHARED",
        "HunYuanDenseV1ForCausalLM": "dense:HUNYUAN",
        "HunYuanMoEV1ForCausalLM": "mixture:HUNYUAN",
        "Jais2ForCausalLM": "dense:JAIS2",
        "JambaForCausalLM": "hybrid:JAMBA",
        "KimiLinearForCausalLM": "hybrid:KIMI_LINEAR",
        "Llama4ForConditionalGeneration": "multimodal:LLAMA4",
        "Mamba2ForCausalLM": "hybrid:MAMBA2",
        "MambaForCausalLM": "hybrid:MAMBA",
        "MiMoV2FlashForCausalLM": "mixture:MIMO",
        "MiniCPM3ForCausalLM": "dense:MINICPM3",
        "MiniMaxM2ForCausalLM": "mixture:MINIMAX_M2",
        "Ministral3ForCausalLM": "dense:MINISTRAL3",
        "MinistralForCausalLM": "dense:MINISTRAL",
        "MllamaForCausalLM": "dense:MLLAMA",
        "NemotronForCausalLM": "dense:NEMOTRON",
        "NemotronHForCausalLM": "hybrid:NEMOTRON_H",
        "Olmo3ForCausalLM": "dense:OLMO3",
        "OlmoForCausalLM": "dense:OLMO",
        "PhiMoEForCausalLM": "mixture:PHIMOE",
        "Qwen3VLMoeForConditionalGeneration": "multimodal:QWEN3_VL",
        "SeedOssForCausalLM": "dense:SEED_OSS",
    }
)
# Those whose layers in transformers cannot be served, so that native ones alone run them, if there are any.
NOT_THROUGH_TRANSFORMERS = frozenset(
    {
        "AXK2ForCausalLM",
        "BambaForCausalLM",
        "BloomForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "FalconForCausalLM",
        "FalconH1ForCausalLM",
        "GPTJForCausalLM",
        "GlmMoeDsaForCausalLM",
        "GptOssForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "HYV4ForCausalLM",
        "JambaForCausalLM",
        "KimiLinearForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm3ForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiniMaxForCausalLM",
        "MptForCausalLM",
        "NemotronHForCausalLM",
        "OlmoHybridForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "RecurrentGemmaForCausalLM",
        "StableLmForCausalLM",
        "XGLMForCausalLM",
    }
)


@functools.cache
def family(name: str) -> Family | None:
    """The family of a Hugging Face class whose sizes alone are known; None for any other class."""
    if name not in SIZES_ONLY:
        return None
    module, _, attribute = SIZES_ONLY[name].partition(":")
    found: Family = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    return found


def is_known(name: str) -> bool:
    """Whether the sizes of an architecture are known."""
    return name in SIZES_ONLY or find(name) is not None


def weight_mapping(name: str) -> WeightMapping:
    """How checkpoints of an architecture name and fuse weights, where its tree does it otherwise."""
    found = family(name)
    return of_native_layers(name) if found is None else WeightMapping(found.weights)


def class_of_type(model_type: object) -> str | None:
    """The Hugging Face class of a `model_type`, with native layers or without; None for an unknown one."""
    types = {found.model_type: name for name in SIZES_ONLY if (found := family(name)) is not None}
    native = name_of_type(model_type)
    return native or (types.get(model_type) if isinstance(model_type, str) else None)


def field_names(name: str | None) -> Iterable[str]:
    """The names of the fields of an architecture's configuration that have defaults; () for an unknown one."""
    found, native = (None, None) if name is None else (family(name), find(name))
    if found is not None:
        return (*found.text, *found.defaults, *found.names, *found.former)
    return () if native is None else tuple(native.defaults)


def filled(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model of an architecture, with the defaults of its class."""
    found, nested = family(name), config.get("text_config")
    inner = {**config, **nested} if isinstance(nested, Mapping) else config
    return with_defaults(name, inner) if found is None else {**found.text, **found.filled(inner)}


def tree_of(name: str, config: Mapping[str, Any]) -> Part:
    """What a model is made of, from the fields of its config.json.

    Raises UnknownSizes if the architecture is not known, or the configuration does not determine its sizes.
    """
    if not is_known(name):
        raise UnknownSizes(f"{name} is an unknown architecture: no size is claimed")
    for fields in (config, config.get("text_config"), config.get("vision_config")):
        _check_layers(fields if isinstance(fields, Mapping) else {})
    found = family(name)
    try:
        tree = known_tree(name, config) if found is None else found.tree(Fields(found.filled(config)))
        _check(tree)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise UnknownSizes(f"config.json has a value that is no size ({type(error).__name__}: {error})") from error
    return tree


def _check_layers(config: Mapping[str, Any]) -> None:
    for count in (config[name] for name in _LAYERS if config.get(name) is not None):
        if not isinstance(count, int) or not 0 <= count <= MAX_LAYERS:
            raise UnknownSizes(f"{count!r} is not a number of layers")


def _check(tree: Part) -> None:
    shapes = (shape for part in distinct(tree) for shape in _shapes(part))
    if not isinstance(parameters(tree), int) or any(min(shape, default=1) < 0 for shape in shapes):
        raise UnknownSizes("config.json has a value that is no size")


def _shapes(part: Part) -> Iterator[tuple[int, ...]]:
    """Those of the weights of a part; of experts, whose number may be any, the sizes."""
    if isinstance(part, Experts):
        yield part.count, part.hidden, part.inner
    else:
        yield from (weight.shape for weight in part.weights())

"""The architectures with native layers, by their names. Torch-free; the layers are imported when a model is built.

    srv.architectures          <Hugging Face class> = package.module:ARCHITECTURE     (a third party's architecture)

The file of an architecture is imported when a model needs it, so that `srv plan` does not wait for the others, and a
faulty one does not affect them. `srv.models.architectures.third_party` checks those of other distributions
(docs/adr/0021-architectures.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.models.architectures.architecture import GROUP, Architecture, NativeConfig
from srv.models.formats.gguf_layout import GGUFLayout
from srv.models.layers.rope_config import UnsupportedConfig
from srv.platform.installed import entries

# The module in this package, by the Hugging Face class.
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "GraniteForCausalLM": "granite",
        "SmolLM3ForCausalLM": "smollm3",
        "Gemma3ForCausalLM": "gemma3",
    }
)
_SUFFIX = "ForCausalLM"


def native_names() -> tuple[str, ...]:
    """The Hugging Face classes of all architectures with native layers."""
    return tuple(dict.fromkeys((*BUILT_IN, *(entry.name for entry in entries(GROUP)))))


def find(name: str) -> Architecture | None:
    """The architecture of a Hugging Face class; None if it has no native layers.

    Raises PluginError if a third party's architecture of that name is faulty, or if two distributions claim the name.
    """
    if any(entry.name == name for entry in entries(GROUP)):
        from srv.models.architectures import third_party  # most installations do not need it

        return third_party.ARCHITECTURES.find(name, taken=name in BUILT_IN)
    return _built_in(name) if name in BUILT_IN else None


def find_gguf(name: object) -> Architecture | None:
    """The architecture of a GGUF file, by its `general.architecture`. Raises PluginError as `find` does."""
    mine = next((each for each in map(_built_in, BUILT_IN) if each.gguf and each.gguf.name == name), None)
    if mine is not None:
        return find(mine.name)
    from srv.models.architectures import third_party

    return third_party.find_gguf(name)


def gguf_names() -> tuple[str, ...]:
    """Every `general.architecture` of the architectures in `srv` itself."""
    return tuple(each.gguf.name for each in map(_built_in, BUILT_IN) if each.gguf)


def gguf_layout(name: str) -> GGUFLayout:
    """The layout of the GGUF files of an architecture, which has been found by `find_gguf` before."""
    architecture = find(name)
    if architecture is None or architecture.gguf is None:
        raise UnsupportedConfig(f"GGUF files of {name} are not supported")
    return architecture.gguf


def name_of_type(model_type: object) -> str | None:
    """The Hugging Face class of a `model_type`, for configurations that name no class."""
    own = {name: _built_in(name).model_type for name in BUILT_IN}
    types = {own.get(name) or name.removesuffix(_SUFFIX).lower(): name for name in native_names()}
    return types.get(model_type) if isinstance(model_type, str) else None


def with_defaults(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the defaults of its native architecture filled in; others are returned unchanged."""
    architecture = find(name)
    return dict(config) if architecture is None else _filled(architecture, config)


def native_config(name: str, config: Mapping[str, Any]) -> NativeConfig:
    """The configuration for native layers. Raises UnsupportedConfig with what they do not implement."""
    architecture = find(name)
    if architecture is None:
        raise UnsupportedConfig(f"architecture {name} has no native layers")
    filled = _filled(architecture, config)
    if name in BUILT_IN:
        return architecture.make_config(filled)
    from srv.models.architectures import third_party

    return third_party.make_config(architecture, filled)


def _built_in(name: str) -> Architecture:
    architecture: Architecture = importlib.import_module(f"{__package__}.{BUILT_IN[name]}").ARCHITECTURE
    return architecture


def _filled(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    filled = {**architecture.defaults, **config}
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = filled.get("num_attention_heads")
    return filled

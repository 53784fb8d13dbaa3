"""What a family without native layers is, as data, and how it reads the fields of a configuration. Torch-free.

Must not know any family: `srv.models.families.known` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import Rule

_NONE: Mapping[str, str] = MappingProxyType({})


class UnknownSizes(Exception):
    """No size is claimed for a model. The message is a clause with the reason."""


class Family(NamedTuple):
    """The facts of one architecture; as `srv.models.families.architecture.Architecture`, without layers.

    `model_type`: in config.json. `tree(fields)`: what the model is made of. `defaults`: the values that transformers'
    configuration class has for fields which a configuration leaves out. `names`: other names of fields, which that
    class reads as well, with those that `defaults` has; `former`: likewise of names from before, which win.
    `text`: the defaults of the fields of a language model within the model; {} without one.
    `weights`: as of `Architecture`.
    """

    model_type: str
    tree: Callable[[Fields], Part]
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = _NONE
    former: Mapping[str, str] = _NONE
    text: Mapping[str, Any] = _NONE
    weights: tuple[Rule, ...] = ()

    def filled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a configuration by the names that `defaults` has, and its other ones, with the defaults."""
        renamed = {own: config[other] for other, own in self.names.items() if other in config and own not in config}
        before = {own: config[other] for other, own in self.former.items() if other in config}
        return {**self.defaults, **config, **renamed, **before}


class Fields:
    """The fields of a configuration with all defaults, as attributes. Reading one without a value is UnknownSizes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise UnknownSizes(f"config.json lacks {name}")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or `default` without one."""
        return self._values.get(name, default)

    def with_values(self, values: Mapping[str, Any]) -> Fields:
        """These fields with other values of some."""
        return Fields({**self._values, **values})

    def text(self) -> Mapping[str, Any]:
        """The configuration of the language model within this one; the fields themselves if none is nested."""
        nested = self._values.get("text_config")
        return nested if isinstance(nested, Mapping) else self._values

    def tower(self) -> Mapping[str, Any]:
        """The configuration of the vision tower; {} if there is none, so that all have their defaults."""
        nested = self._values.get("vision_config")
        return nested if isinstance(nested, Mapping) else {}


def common(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, keys: int | None, context: int, **other: Any
) -> dict[str, Any]:
    """The defaults of fields that most configurations have, and `other` ones. `keys`: KV heads; None for all heads."""
    usual = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return {**usual, **other}

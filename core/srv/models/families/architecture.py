"""What core must know of an architecture, as data: one value, with native layers or without. Torch-free.

`srv plan` reads it without torch; the layers are imported when a model is built. Must not know any
architecture by name: `srv.models.families.registry` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import Rule

GROUP = "srv.architectures"  # the entry points of other distributions
DECODER = "srv.models.modules.decoder:Decoder"
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class Pooled(NamedTuple):
    """What a model says of itself that generates no text: its hidden states are pooled.

    `positions`: the most tokens of a prompt; None: the context of the configuration. `labels`: how many its
    classification head has; 0 without one. `pooled_by`: how its head, or an embedding, pools where no file of the
    checkpoint says so; a value of `srv.types.Pooling`.
    """

    positions: int | None
    labels: int
    pooled_by: str


class Architecture(NamedTuple):
    """The facts of one architecture.

    `name`: the Hugging Face class, such as "LlamaForCausalLM". `tree(config)`: from the fields of config.json, with
    `defaults` filled in, to the blueprint of the model, from which all else follows (`srv.models.derive`). It raises
    UnsupportedConfig with the name of a field that the layers do not implement. `defaults`: the values that
    transformers uses for fields that a configuration leaves out. `gguf`: the layout of its GGUF files; None if they are
    not supported. `layers`: "module:Class" of a `srv.models.base.NativeModel`; None if `srv` knows the sizes of the
    architecture, but has no layers for it. `model_type`: its `model_type` in config.json, if that is not the name in
    lower case without "ForCausalLM". `weights`: the rules by which its safetensors checkpoints differ from what the
    layers hold; () if names and rows are the same. `pooled(config)`: of a model that generates no text, from the same
    fields; None of the others.

    `runs_through_transformers`: False if the attention of its class there cannot be replaced, so that native layers
    alone run it. `names`: other names of fields, which the class of transformers reads as well, with those that
    `defaults` has; `former_names`: likewise of names from before, which win. `text_defaults`: those of the
    fields of a language model within the model. `published_names`: other classes that published
    configurations name. `types_after_padding`: the model types whose first token has the position after the id of the
    padding token.
    """

    name: str
    tree: Callable[[Mapping[str, Any]], Part]
    defaults: Mapping[str, Any]
    gguf: GGUFLayout | None = None
    layers: str | None = DECODER
    model_type: str | None = None
    weights: tuple[Rule, ...] = ()
    pooled: Callable[[Mapping[str, Any]], Pooled] | None = None
    runs_through_transformers: bool = True
    names: Mapping[str, str] = _NO_NAMES
    former_names: Mapping[str, str] = _NO_NAMES
    text_defaults: Mapping[str, Any] = _NO_FIELDS
    published_names: tuple[str, ...] = ()
    types_after_padding: tuple[str, ...] = ()

    def with_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a configuration by the names that `defaults` has, and its other ones, with the defaults."""
        renamed = {name: config[other] for other, name in self.names.items() if other in config and name not in config}
        former = {name: config[other] for other, name in self.former_names.items() if other in config}
        fields = {**self.defaults, **config, **renamed, **former}
        if self.layers is not None and fields.get("num_key_value_heads") is None:
            fields["num_key_value_heads"] = fields.get("num_attention_heads")
        return fields

"""What core must know of an architecture with native layers, as data. Torch-free.

An architecture is two files: its facts (an `Architecture`), which `srv plan` reads without torch, and its layers, which
are imported when a model is built. Must not know any architecture by name: `srv.models.families.known` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import GGUFLayout
from srv.models.checkpoints.rules import Rule

GROUP = "srv.architectures"  # the entry points of other distributions
DECODER = "srv.models.modules.decoder:Decoder"


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
    not supported. `layers`: "module:Class" of a `srv.models.base.NativeModel`. `model_type`: its `model_type` in
    config.json, if that is not the name in lower case without "ForCausalLM". `weights`: the rules by which its
    safetensors checkpoints differ from what the layers hold; () if names and rows are the same. `pooled(config)`: of a
    model that generates no text, from the same fields; None of the others.
    """

    name: str
    tree: Callable[[Mapping[str, Any]], Part]
    defaults: Mapping[str, Any]
    gguf: GGUFLayout | None = None
    layers: str = DECODER
    model_type: str | None = None
    weights: tuple[Rule, ...] = ()
    pooled: Callable[[Mapping[str, Any]], Pooled] | None = None

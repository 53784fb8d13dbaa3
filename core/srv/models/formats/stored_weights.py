"""How safetensors checkpoints name and store the weights of an architecture, where its layers do it otherwise.

Torch-free: facts are counted by the same names. `srv.models.formats.architecture_storage` converts the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

_NUMBER = re.compile(r"\.(\d+)\.")
_NONE: Mapping[str, str] = MappingProxyType({})
_PREDICTION = ".eh_proj.weight"  # joins the embedding of the next token and a hidden state
_QWEN_PREDICTION = "mtp."  # where "fc" does it

# The order of rows in a fused matrix: all queries, then all keys, then all values; or, for each KV head, its queries,
# its key and its value.
FusedRows: TypeAlias = Literal["parts", "groups"]
ExpertLayout: TypeAlias = Literal["", "halves", "pairs"]


class StoredWeights(NamedTuple):
    """The weights of one architecture, as its checkpoints have them.

    `prefix`: the beginning of all names but that of the output layer, which some checkpoints leave out. `names`: from
    the stored names of modules, or of single tensors, without it, to those of the layers; "*" stands for the number of
    a layer, of which a name has at most one. Other names stay as they are. `unused`: stored tensors, with their prefix,
    that no layer needs. `fused`: the name of the matrix of queries, keys and values in a layer
    ("self_attn.query_key_value"), which is divided into q_proj, k_proj and v_proj; "" if it is not fused. `rows`: the
    order of its rows. `fused_mlp`: the name of the matrix of gate and up projection ("mlp.gate_up_proj"), which is
    divided into its halves; "" likewise. `up_first`: whether the up projection is its first half.
    `interleaved`: the function from the fields of the configuration to the number of dimensions per head whose rotary
    pairs are adjacent (GPT-J); they are reordered, so that the pairs are those of the other models. None for none.
    `interleaved_indexer`: whether the pairs of the indexer of sparse attention are adjacent as well.
    `gated_queries`: whether each query is followed by a gate of the size of a value in the projection of both.
    `transposed`: names of modules of a layer, as the layers have them, whose weights are stored as [in, out].
    `fused_experts`: how checkpoints have the experts of a layer in two tensors, "experts.gate_up_proj" [E, in, 2 out]
    and "experts.down_proj" [E, in, out], and their biases likewise: with the columns of the gate before those of the up
    projection ("halves"), or in turn ("pairs"). "": not in two tensors.
    `components`: from the parts of stored names between dots to those of the layers, wherever they stand.
    `suffixes`: old names of the last part of a name ("gamma"), with those of today.
    """

    prefix: str = ""
    names: Mapping[str, str] = _NONE
    unused: tuple[str, ...] = ()
    fused: str = ""
    rows: FusedRows = "parts"
    interleaved: Callable[[Mapping[str, Any]], int] | None = None
    interleaved_indexer: bool = False
    gated_queries: bool = False
    fused_mlp: str = ""
    up_first: bool = False
    transposed: tuple[str, ...] = ()
    components: Mapping[str, str] = _NONE
    fused_experts: ExpertLayout = ""
    suffixes: Mapping[str, str] = _NONE

    @property
    def in_own_order(self) -> bool:
        """Whether tensors are fused, or their rows ordered, otherwise than in the layers."""
        fused = self.fused or self.fused_mlp or self.fused_experts
        return bool(fused or self.transposed or self.interleaved is not None)

    def is_transposed(self, name: str) -> bool:
        return any(name.endswith(f".{module}.weight") for module in self.transposed)

    def model_name(self, stored: str) -> str | None:
        """The name of a stored tensor in the model; None if no layer needs it."""
        if _NUMBER.sub(".*.", stored, count=1) in self.unused:
            return None
        if self.components:
            stored = ".".join(self.components.get(part, part) for part in stored.split("."))
        module, suffix = _divided(stored.removeprefix(self.prefix))
        found = _NUMBER.search(module)
        pattern = module if found is None else _NUMBER.sub(".*.", module, count=1)
        whole = self.names.get(f"{pattern}.{suffix}")
        name = whole or self.names.get(pattern)
        if name is None:
            return stored
        name = name if found is None else name.replace("*", found[1])
        return name if whole else f"{name}.{self.suffixes.get(suffix, suffix)}"

    def stored_name(self, module: str) -> str:
        """The name that checkpoints have for a module of the layers; the first one if they have several."""
        found = _NUMBER.search(module)
        pattern = module if found is None else _NUMBER.sub(".*.", module, count=1)
        stored = next((name for name, own in self.names.items() if own == pattern), None)
        if stored is None:
            stored = module
        else:
            stored = self.prefix + (stored if found is None else stored.replace("*", found[1]))
        own_names = {own: name for name, own in self.components.items()}
        return ".".join(own_names.get(part, part) for part in stored.split("."))

    def parts(self, name: str) -> tuple[str, ...]:
        """The names of the model's tensors that a tensor of this name is divided into: itself, or two or three."""
        if self.fused and f".{self.fused}." in name:
            return tuple(name.replace(self.fused, f"self_attn.{each}_proj") for each in "qkv")
        if self.fused_mlp and f".{self.fused_mlp}." in name:
            mlp = self.fused_mlp.rpartition(".")[0]
            order = ("up", "gate") if self.up_first else ("gate", "up")
            return tuple(name.replace(self.fused_mlp, f"{mlp}.{each}_proj") for each in order)
        return (name,)

    def whole(self, names: Sequence[str]) -> tuple[str, ...]:
        """The name of the stored matrix that consists of layers of these names; the names themselves if none does."""
        mlp = self.fused_mlp.rpartition(".")[0]
        for fused, first in ((self.fused, "self_attn.q_proj"), (self.fused_mlp, f"{mlp}.gate_proj")):
            if fused and names[0].endswith(f".{first}"):
                stored = names[0].removesuffix(first) + fused
                if sorted(self.parts(f"{stored}.")) == sorted(f"{name}." for name in names):
                    return (stored,)
        return tuple(names)


def _divided(name: str) -> tuple[str, str]:
    """The module of a tensor, and the rest of its name: bitsandbytes has "weight.absmax" and others below a weight."""
    module, below, rest = name.partition(".weight.")
    if below:
        return module, f"weight.{rest}"
    module, _, suffix = name.rpartition(".")
    return module, suffix


def prediction_layers(names: Iterable[str]) -> tuple[str, ...]:
    """The prefixes of layers that predict further tokens (MTP): checkpoints store them after the model's own layers.

    They are not served. `names`: of all stored tensors of a checkpoint.
    """
    of_qwen = f"{_QWEN_PREDICTION}fc.weight"
    ends = (name for name in names if name.endswith(_PREDICTION) or name == of_qwen)
    return tuple(_QWEN_PREDICTION if name == of_qwen else name.removesuffix(_PREDICTION[1:]) for name in ends)

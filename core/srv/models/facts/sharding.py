"""How native models are sharded over ranks: which numbers of ranks a model allows, and the facts of one rank's part.

Torch-free: `srv plan` and a launch ask the same questions. `srv.models.layers.factory` divides the matrices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, assert_never

import msgspec

from srv.dist.group import is_divisible
from srv.kept import kept_per_object
from srv.models import derive
from srv.models.families.trees import native_tree, native_tree_of
from srv.quantization import registry as quantization
from srv.specs import CacheSpec, FullAttention, Latent, ModelFacts, Recurrent, SlidingWindow

MAX_LISTED_RANKS = 64  # legal sizes are listed up to this one


class Divisions(NamedTuple):
    """The sizes of a model that are divided among ranks.

    `block`: the columns of o_proj and down_proj can only be divided at multiples of it (1 unless they stay quantized in
    blocks).
    """

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    block: int

    def obstacles(self, ranks: int) -> list[str]:
        """Clauses that say which sizes cannot be divided among `ranks` ranks; [] if all can."""
        found = [
            f"its {size} {name} are not a multiple of {ranks}"
            for name, size in (
                ("attention heads", self.heads),
                ("units of intermediate size", self.intermediate),
                ("tokens of vocabulary", self.vocab),
            )
            if size % ranks
        ]
        if not is_divisible(self.kv_heads, ranks):
            found.append(f"its {self.kv_heads} KV heads can neither be divided among {ranks} ranks nor copied evenly")
        if found:
            return found
        return [
            f"a rank's {columns // ranks} columns of {layer} are not whole quantization blocks of {self.block}"
            for layer, columns in (("o_proj", self.heads * self.head_dim), ("down_proj", self.intermediate))
            if columns // ranks % self.block
        ]

    def legal_ranks(self) -> tuple[int, ...]:
        """All numbers of ranks, up to MAX_LISTED_RANKS, that divide everything."""
        return _legal_ranks(self)


@functools.lru_cache(maxsize=64)  # the support matrix asks about few models, many times
def _legal_ranks(sizes: Divisions) -> tuple[int, ...]:
    return tuple(ranks for ranks in range(1, min(sizes.heads, MAX_LISTED_RANKS) + 1) if not sizes.obstacles(ranks))


@kept_per_object
def divisions(model: ModelFacts, *, in_blocks: bool) -> Divisions | str:
    """The divided sizes of a model, or the clause that says why it cannot be sharded at all.

    `in_blocks`: the matrices of a GGUF file stay quantized.
    """
    method = quantization.method_of(model)
    if method is not None and method.sharding is not None:
        return method.sharding
    if method is None and (stored := model.quantization or ("int8" if model.stored_types.get("int8") else None)):
        return f"weights quantized with {stored} cannot be sharded yet"
    if any(isinstance(group, Recurrent) for group in model.cache_groups):
        return "recurrent states cannot be sharded yet"
    tree = native_tree_of(model)
    if isinstance(tree, str):
        return f"only models with native layers can be sharded ({tree})"
    sizes = derive.divided(tree)
    if sizes is None:
        return f"the layers of {model.architecture} cannot be sharded"
    return Divisions(*sizes, block=model.column_block if in_blocks else 1)


def rank_facts(model: ModelFacts, ranks: int) -> ModelFacts:
    """The facts as one of `ranks` ranks sees them: its share of heads, KV heads and parameters."""
    if ranks == 1:
        return model
    kv_heads = max(1, model.kv_heads // ranks)
    return dataclasses.replace(
        model,
        heads=model.heads // ranks,
        kv_heads=kv_heads,
        cache_groups=tuple(_of_rank(group, kv_heads) for group in model.cache_groups),
    )


def _of_rank(group: CacheSpec, kv_heads: int) -> CacheSpec:
    """A cache group as one of several ranks stores it."""
    match group:
        case FullAttention() | SlidingWindow():
            return msgspec.structs.replace(group, kv_heads=kv_heads)
        case Latent():
            return group  # all heads share the latents, so every rank stores them
        case Recurrent():
            return group  # `divisions` refuses such models
        case _ as never:
            assert_never(never)


def rank_share(model: ModelFacts, ranks: int) -> float:
    """The share of the parameters that one of `ranks` ranks holds; norms and few KV heads are on every rank."""
    if ranks == 1:
        return 1.0
    tree = native_tree(model.architecture, model.config)
    return derive.parameters(tree.of_rank(ranks)) / derive.parameters(tree)

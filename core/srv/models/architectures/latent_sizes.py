"""The sizes of multi-head latent attention in a model. Torch-free; `latent_attention` computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.blueprint import Linear, Norm, Tensors
from srv.models.latent_parts import Indexer, Latent
from srv.models.layers.rope_config import RopeConfig, UnsupportedConfig
from srv.specs import IndexDims, LatentDims


class LatentSizes(NamedTuple):
    """The sizes of one layer. `query_rank`: those of the compressed queries; None if they are not compressed.

    `norm_eps`: of the norms of compressed vectors. `bias`: whether the projections from and to hidden states have one,
    except uncompressed queries. `indexer`: that of the layers which have one; its keys have a layer norm with
    `index_norm_eps`, and their last dimensions are rotated if `index_rotates_last`, otherwise the first. `gated`: the
    result of attention is multiplied by the sigmoid of a gate, which follows from the hidden states; `gated_queries`:
    it is beside each query, and both follow from the compressed queries with and without their norm (A.X-K2). `sinks`:
    as in `srv.specs.AttentionLayer`.
    """

    hidden: int
    heads: int
    dims: LatentDims
    query_rank: int | None
    scale: float
    norm_eps: float
    bias: bool = False
    indexer: IndexDims | None = None
    index_norm_eps: float = 1e-6
    index_rotates_last: bool = False
    gated: bool = False
    gated_queries: bool = False
    sinks: bool = False

    @property
    def head_dim(self) -> int:
        return self.dims.key_dim + self.dims.rope_dim

    @property
    def query_dim(self) -> int:
        """The outputs for a head of the projection to queries, which are before those for its gate."""
        return self.head_dim + self.dims.value_dim * self.gated_queries

    @property
    def query_projection(self) -> tuple[str, int]:
        """Its name and its inputs."""
        if self.query_rank is None:
            return "q_proj", self.hidden
        return ("q_gate_proj", 2 * self.query_rank) if self.gated_queries else ("q_b_proj", self.query_rank)

    @property
    def indexer_projections(self) -> Mapping[str, tuple[int, int]]:
        """The inputs and outputs of the linear layers of an indexer, by their names."""
        if (own := self.indexer) is None or self.query_rank is None:
            return {}
        queries = (self.query_rank, own.heads * own.dim)
        return {"wq_b": queries, "wk": (self.hidden, own.dim), "weights_proj": (self.hidden, own.heads)}

    def part(self, rope: RopeConfig, has_indexer: bool, name: str = "self_attn") -> Latent:
        """The attention of a layer. `has_indexer`: of its own, in models that have indexers."""
        heads, dims, hidden = self.heads, self.dims, self.hidden
        down = {"kv_a_proj_with_mqa": dims.latent_dim + dims.rope_dim}
        query_norm = None
        if self.query_rank is not None:
            down = {"q_a_proj": self.query_rank, **down}
            query_norm = Norm(self.query_rank, self.norm_eps, name="q_a_layernorm")
        queries, inputs = self.query_projection
        values, per_head = heads * dims.value_dim, dims.key_dim + dims.value_dim
        return Latent(
            Linear(down, hidden, self.bias),
            query_norm,
            Linear({queries: heads * self.query_dim}, inputs, split="out", unit=self.query_dim),
            Norm(dims.latent_dim, self.norm_eps, name="kv_a_layernorm"),
            Tensors({"kv_b_proj.weight": (heads * per_head, dims.latent_dim)}, divided=True, projects=True),
            self._indexer_part() if has_indexer else None,
            Linear({"gate_proj": values}, hidden, split="out", unit=dims.value_dim) if self.gated else None,
            Tensors({"sinks": (heads,)}, divided=True) if self.sinks else None,
            Linear({"o_proj": hidden}, values, self.bias, split="in"),
            heads,
            self.head_dim,
            dims,
            self.scale,
            rope,
            self.indexer,
            name=name,
        )

    def _indexer_part(self) -> Indexer | None:
        if self.indexer is None:
            return None
        queries, keys, scores = (
            Linear({name: outputs}, inputs) for name, (inputs, outputs) in self.indexer_projections.items()
        )
        norm = Norm(self.indexer.dim, self.index_norm_eps, rms=False, bias=True, name="k_norm")
        rotated = self.dims.rope_dim
        head = rotated if self.index_rotates_last else self.indexer.dim
        return Indexer(queries, keys, scores, norm, head, rotated, name="indexer")


def latent_sizes(config: Mapping[str, Any], rope: RopeConfig, norm_eps: float) -> LatentSizes:
    """From the fields of DeepSeek-V2's configuration. Raises UnsupportedConfig for sizes that cannot be computed."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent, key, rotary, value = (int(config[name]) for name in names)
    for name, size in zip(names, (latent, key, rotary, value), strict=True):
        if size < 1:
            raise UnsupportedConfig(f"{name} = {size} is not a size")
    rank = config.get("q_lora_rank")
    if rank is not None and int(rank) < 1:
        raise UnsupportedConfig(f"q_lora_rank = {rank} is not a size")
    return LatentSizes(
        hidden=int(config["hidden_size"]),
        heads=int(config["num_attention_heads"]),
        dims=LatentDims(latent, key, rotary, value),
        query_rank=None if rank is None else int(rank),
        scale=(key + rotary) ** -0.5 * _yarn_scale(rope),
        norm_eps=norm_eps,
        bias=bool(config["attention_bias"]),
    )


def index_dims(config: Mapping[str, Any]) -> IndexDims:
    """From the fields of DeepSeek-V3.2's configuration. Raises UnsupportedConfig for sizes that cannot be computed."""
    names = ("index_n_heads", "index_head_dim", "index_topk")
    heads, dim, top_k = (int(config[name]) for name in names)
    for name, size in zip(names, (heads, dim, top_k), strict=True):
        if size < 1:
            raise UnsupportedConfig(f"{name} = {size} is not a size")
    if dim < (rotary := int(config["qk_rope_head_dim"])):
        raise UnsupportedConfig(f"index_head_dim = {dim} has no room for qk_rope_head_dim = {rotary}")
    if config.get("q_lora_rank") is None:
        raise UnsupportedConfig("q_lora_rank = None: the queries of an indexer follow from compressed queries")
    return IndexDims(heads, dim, top_k)


def _yarn_scale(rope: RopeConfig) -> float:
    """What YaRN multiplies the scores by, if the configuration has its `mscale_all_dim`: the square of its factor."""
    weight, factor = rope.parameters.get("mscale_all_dim") or 0, rope.parameters.get("factor") or 1
    if rope.rope_type == "default" or not weight or factor <= 1:
        return 1.0
    scale = 0.1 * float(weight) * math.log(float(factor)) + 1.0
    return scale * scale

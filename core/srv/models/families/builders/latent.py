"""Multi-head latent attention, from its sizes. Torch-free; `srv.models.modules.latent_attention` computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from srv.models.blueprint import Linear, Norm, Tensors
from srv.models.blueprint.latent import Indexer, Latent
from srv.models.layers.rope_config import RopeConfig
from srv.models.unsupported import UnsupportedConfig
from srv.specs import IndexDims, LatentDims


class LatentSizes(NamedTuple):
    """The sizes of latent attention. `query_rank`: those of the compressed queries; None if they are not compressed."""

    hidden: int
    heads: int
    dims: LatentDims
    query_rank: int | None
    scale: float
    norm_eps: float


def latent_attention(
    sizes: LatentSizes,
    rope: RopeConfig,
    *,
    bias: bool = False,
    index: IndexDims | None = None,
    indexer: Indexer | None = None,
    gated: bool = False,
    gated_queries: bool = False,
    sinks: bool = False,
    name: str = "self_attn",
) -> Latent:
    """Latent attention. `bias`: of the projections from and to hidden states, except uncompressed queries.

    `index`: of models that have indexers; `indexer`: that of this layer. `gated`: the result is multiplied by the
    sigmoid of a gate, which follows from the hidden states; `gated_queries`: it is beside each query, and both follow
    from the compressed queries with and without their norm (A.X-K2). `sinks`: as in `srv.specs.AttentionLayer`.
    """
    heads, dims, hidden, rank = sizes.heads, sizes.dims, sizes.hidden, sizes.query_rank
    head_dim, values, per_head = dims.key_dim + dims.rope_dim, heads * dims.value_dim, dims.key_dim + dims.value_dim
    query_dim = head_dim + dims.value_dim * gated_queries  # queries are before their gates
    down = {"kv_a_proj_with_mqa": dims.latent_dim + dims.rope_dim}
    queries, inputs, query_norm = "q_proj", hidden, None
    if rank is not None:
        queries, inputs = ("q_gate_proj", 2 * rank) if gated_queries else ("q_b_proj", rank)
        down = {"q_a_proj": rank, **down}
        query_norm = Norm(rank, sizes.norm_eps, name="q_a_layernorm")
    return Latent(
        Linear(down, hidden, bias),
        query_norm,
        Linear({queries: heads * query_dim}, inputs, split="out", unit=query_dim),
        Norm(dims.latent_dim, sizes.norm_eps, name="kv_a_layernorm"),
        Tensors({"kv_b_proj.weight": (heads * per_head, dims.latent_dim)}, divided=True, projects=True),
        indexer,
        Linear({"gate_proj": values}, hidden, split="out", unit=dims.value_dim) if gated else None,
        Tensors({"sinks": (heads,)}, divided=True) if sinks else None,
        Linear({"o_proj": hidden}, values, bias, split="in"),
        heads,
        head_dim,
        dims,
        sizes.scale,
        rope,
        index,
        name=name,
    )


def indexer_part(sizes: LatentSizes, index: IndexDims, *, norm_eps: float, rotates_last: bool = False) -> Indexer:
    """The indexer of a layer, whose queries follow from compressed ones. `norm_eps`: of the layer norm of its keys.

    `rotates_last`: the last dimensions of a head are rotated, otherwise the first.
    """
    dim, rotated, rank = index.dim, sizes.dims.rope_dim, sizes.query_rank or 0
    return Indexer(
        Linear({"wq_b": index.heads * dim}, rank),
        Linear({"wk": dim}, sizes.hidden),
        Linear({"weights_proj": index.heads}, sizes.hidden),
        Norm(dim, norm_eps, rms=False, bias=True, name="k_norm"),
        rotated if rotates_last else dim,
        rotated,
        name="indexer",
    )


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

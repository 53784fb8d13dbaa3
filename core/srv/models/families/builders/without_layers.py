"""What families without native layers build their trees with, from the fields of a configuration. Torch-free.

Epsilons, scales and rotary parameters are those of any model: no size depends on them. Must not know any family.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from srv.models.blueprint import MLP, Attention, Decoder, Linear, Mixer, MoE, Norm, Part, Tensors, alike
from srv.models.blueprint.latent import Latent
from srv.models.blueprint.without_layers import Group, States, UncachedAttention
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.latent import LatentSizes, latent_attention
from srv.models.layers.moe_config import Routing
from srv.models.layers.rope_config import DEFAULT_THETA, RopeConfig
from srv.models.unsupported import UnsupportedConfig
from srv.specs import LatentDims

EPS = 1e-6
ROUTED = {"num_local_experts": "n_routed_experts"}  # another name of a field
SLIDING, FULL = "sliding_attention", "full_attention"


def sizes(c: Mapping[str, Any], **changes: Any) -> Sizes:
    """The sizes of a decoder. `changes`: other values of its fields."""
    heads = c["num_attention_heads"]
    dim = c.get("head_dim") or c["hidden_size"] // heads
    base = Sizes(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=dim,
        norm_eps=EPS,
        tied_embeddings=bool(c["tie_word_embeddings"]),
        layers=c["num_hidden_layers"],
        rope=_rope(c, dim),
    )
    return base._replace(**changes)


def _rope(c: Mapping[str, Any], dim: int) -> RopeConfig:
    return RopeConfig(DEFAULT_THETA, dim, "default", c["max_position_embeddings"], c["max_position_embeddings"], {})


def kinds(c: Mapping[str, Any], default: Callable[[int], str]) -> Sequence[str]:
    """The kind of each layer: `layer_types`, else `default` of its index."""
    count, stated = c["num_hidden_layers"], c.get("layer_types")
    if stated is None:
        return [default(index) for index in range(count)]
    if len(stated) < count:
        raise UnsupportedConfig(f"layer_types has {len(stated)} entries for {count} layers")
    return list(stated)[:count]


def windows(c: Mapping[str, Any], default: Callable[[int], str]) -> tuple[int | None, ...]:
    """The window of each layer, by its kind."""
    return tuple(c.get("sliding_window") if kind == SLIDING else None for kind in kinds(c, default))


def every(pattern: int) -> Callable[[int], str]:
    """Full attention in every `pattern`-th layer, and a window in the others."""
    return lambda index: SLIDING if (index + 1) % pattern else FULL


def experts(
    base: Sizes, count: int, inner: int, used: int, *, shared: int = 0, correction: bool = False, router: str = "gate",
    name: str = "mlp",
) -> MoE:  # fmt: skip
    """A mixture of experts, with an MLP of inner size `shared` beside them. `correction`: of the router's choice."""
    routing = Routing(used, bias=correction)
    return parts.mixture(
        base, count, inner, routing, shared=shared, shared_name="shared_experts", router=router, name=name
    )


def sparse_from(c: Mapping[str, Any], first: int | None) -> tuple[bool, ...]:
    """Whether each layer has experts: by `mlp_layer_types`, else from layer `first` on."""
    types = c.get("mlp_layer_types")
    return tuple(
        types[index] == "sparse" if types else index >= (first or 0) for index in range(c["num_hidden_layers"])
    )


def layer_norm(size: int, name: str) -> Norm:
    return Norm(size, EPS, rms=False, bias=True, name=name)


def attention_of_layers(
    base: Sizes, windows: Sequence[int | None], *, norms: parts.QueryKeyNorms | None = None, bias: bool = False
) -> tuple[Attention, ...]:
    """The attention of each layer, by its window."""
    return alike(windows, lambda window: parts.attention(base, bias=bias, norms=norms, window=window))


def uniform(base: Sizes, mixer: Mixer, feeding: MLP | MoE, *after: Part) -> Decoder:
    """A decoder whose layers are alike. `after`: beside `feeding`."""
    layer = dataclasses.replace(parts.pre_norm(base, mixer, feeding), after=after)
    return parts.decoder(base, (layer,) * base.layers)


def normed(
    base: Sizes, mixers: Attention | Sequence[Attention], feeding: Part, *, output_bias: bool = False
) -> Decoder:
    """A decoder whose layers have layer norms before attention and `feeding`."""
    hidden = base.hidden_size
    before, between = layer_norm(hidden, parts.BEFORE_MIXER), layer_norm(hidden, parts.BEFORE_MLP)
    made = alike(parts.of_layers(base, mixers), lambda mixer: Group((before, mixer, between, feeding)))
    return parts.decoder(base, made, layer_norm(hidden, "norm"), output_bias=output_bias)


def latent(c: Mapping[str, Any], base: Sizes) -> Latent:
    """Latent attention of DeepSeek-V2."""
    value = c["v_head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    dims = LatentDims(c["kv_lora_rank"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], value)
    rank, scale = c["q_lora_rank"] or None, (dims.key_dim + dims.rope_dim) ** -0.5
    found = LatentSizes(c["hidden_size"], c["num_attention_heads"], dims, rank, scale, EPS)
    return latent_attention(found, _rope(c, base.head_dim), bias=bool(c["attention_bias"]))


def mamba1(
    c: Mapping[str, Any], name: str, *, inner: int, state: int, rank: int, width: int, conv_bias: bool, bias: bool,
    norms: tuple[Norm, ...] = (),
) -> States:  # fmt: skip
    """A Mamba mixer. `rank`: of the projection of time steps."""
    hidden = c["hidden_size"]
    shapes = {"conv1d.weight": (inner, 1, width), "A_log": (inner, state), "D": (inner,)}
    shapes |= {"conv1d.bias": (inner,)} if conv_bias else {}
    linears = (
        Linear({"in_proj": 2 * inner}, hidden, bias),
        Linear({"x_proj": rank + 2 * state}, inner),
        Linear({"dt_proj": inner}, rank, bias=True),
        Linear({"out_proj": hidden}, inner, bias),
    )
    return States((*linears, Tensors(shapes), *norms), (inner, width), (inner, state), name=name)


def uncached(attention: Attention, **changes: Any) -> UncachedAttention:
    fields = {each.name: getattr(attention, each.name) for each in dataclasses.fields(attention)}
    return UncachedAttention(**{**fields, **changes})


def deepseek_experts(c: Mapping[str, Any], base: Sizes) -> MoE:
    """A shared MLP of several experts' size, and a correction of the router."""
    inner = c["moe_intermediate_size"]
    shared = (c.get("n_shared_experts") or 0) * inner
    return experts(base, c["n_routed_experts"], inner, c["num_experts_per_tok"], shared=shared, correction=True)


def either(base: Sizes, sparse: MoE, is_sparse: Sequence[bool]) -> list[MLP | MoE]:
    """The feed-forward part of each layer: experts, or an MLP."""
    dense = parts.mlp(base)
    return [sparse if each else dense for each in is_sparse]


def alone(c: Mapping[str, Any], mixers: tuple[Part, ...], **other: Any) -> Part:
    """Layers that are each one part after a norm."""
    count = len(mixers)
    heads = c.get("num_attention_heads") or 1
    filled = {"num_attention_heads": heads, "num_hidden_layers": count, "intermediate_size": 0, **other}
    base = sizes({**c, "max_position_embeddings": 1, **filled})
    norm = Norm(base.hidden_size, EPS, name="norm")
    tree = parts.decoder(base, alike(mixers, lambda mixer: Group((norm, mixer))))
    return dataclasses.replace(tree, stack=dataclasses.replace(tree.stack, name="backbone"))


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

"""DeepSeek-V2 and V3: the facts of decoders with latent attention and, from some layer on, a mixture of experts.

Torch-free; `deepseek_layers` computes. Owns what both have in common; the file of each one says how it chooses experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.architectures.architecture import DividedSizes
from srv.models.architectures.decoder_config import DecoderConfig, decoder_config
from srv.models.architectures.latent_sizes import LatentSizes, latent_sizes
from srv.models.architectures.op_uses import decoder_ops
from srv.models.blueprint import LAYER_NORM, NORM, ROTARY, OpUse, torch_op
from srv.models.derive import Matrix, ModelOps
from srv.models.formats.stored_weights import StoredWeights
from srv.models.layers.moe_config import COUNT_FIELDS, MoEConfig, Routing
from srv.models.layers.rope_config import UnsupportedConfig, refuse_unless
from srv.specs import AttentionLayer

ATTENTION_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"
INNER_NORM_EPS = 1e-6  # of the norms of compressed vectors, whatever rms_norm_eps is
WEIGHTS = StoredWeights(interleaved=lambda config: int(config["qk_rope_head_dim"]))  # rotary pairs are adjacent
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)
# Only these values of fields that change the computation are implemented; None is as if the field were left out.
SUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"mlp_layer_types": (), "moe_layer_freq": (1,), "mlp_bias": (False,), "rope_interleave": (True,)}
)


class DeepseekConfig(NamedTuple):
    """`decoder`: everything besides attention; its heads are those of the rotary part. `attention`: of every layer.

    `indexed`: whether each layer has an indexer, if `attention` has one; without, it uses that of a layer before it.
    `gate_rank`: the inner size of the gates of norms (`srv.models.layers.gated_norm`), 0 if norms have none.
    """

    decoder: DecoderConfig
    attention: LatentSizes
    indexed: tuple[bool, ...] = ()
    gate_rank: int = 0

    @property
    def moe(self) -> MoEConfig | None:
        """The mixture of experts of the layers that have one."""
        return self.decoder.moe

    @property
    def parameters(self) -> int:
        """The number of parameters; tied embeddings count once."""
        indexers = sum(self.indexed) * self.attention.indexer_parameters
        latent = self.decoder.layers * (self.attention.parameters - self._plain_attention)
        return self.decoder.parameters + latent + indexers + self._gate_params

    @property
    def projection_params(self) -> int:
        """The number of weights in linear layers, without the embeddings and the output layer (and without biases)."""
        latent = self.attention.projection_params - self._plain_attention
        indexers = sum(self.indexed) * self.attention.indexer_projection_params
        return self.decoder.projection_params + self.decoder.layers * latent + indexers + self._gate_params

    @property
    def _gate_params(self) -> int:
        """The weights of the gates of all norms."""
        gated = sum(len(self.gated_norms(index)) for index in range(self.decoder.layers))
        return gated * 2 * self.decoder.hidden_size * self.gate_rank

    @property
    def _plain_attention(self) -> int:
        """The weights that `decoder` counts for the attention of a layer."""
        sizes = self.decoder
        return 2 * sizes.hidden_size * (sizes.heads + sizes.kv_heads) * sizes.head_dim

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        return tuple(self.attention.layer(index, self.has_indexer(index)) for index in range(self.decoder.layers))

    def has_indexer(self, index: int) -> bool:
        return bool(self.indexed) and self.indexed[index]

    def gated_norms(self, index: int) -> tuple[str, ...]:
        """The norms of a layer that have a gate: if any have, the first one and that of a mixture of experts."""
        if not self.gate_rank:
            return ()
        return (ATTENTION_NORM,) if self.decoder.moe_of(index) is None else (ATTENTION_NORM, MLP_NORM)

    @property
    def divided(self) -> DividedSizes | None:
        """Heads have one compressed vector in common, which every rank stores."""
        sizes = self.decoder.divided
        return None if sizes is None else sizes._replace(kv_heads=1, head_dim=self.attention.dims.value_dim)

    def of_rank(self, ranks: int) -> DeepseekConfig:
        """The part of one rank. Compressed vectors, and what computes them, are on every rank."""
        return self._replace(decoder=self.decoder.of_rank(ranks), attention=self.attention.of_rank(ranks))

    def model_ops(self, dtype: str) -> ModelOps:
        base = decoder_ops(self.decoder)
        sizes = dict.fromkeys(size for size in (self.attention.query_rank, self.attention.dims.latent_dim) if size)
        inner = [OpUse(NORM, {"dim": size}) for size in sizes if size != self.decoder.hidden_size]
        if (indexer := self.attention.indexer) is not None:
            rotated = self.attention.dims.rope_dim
            head = rotated if self.attention.index_rotates_last else indexer.dim
            inner.append(OpUse(ROTARY, {"head_dim": head, "rotary_dim": rotated}))
            inner.append(torch_op(LAYER_NORM, indexer.dim))
        ops = tuple({(use.op, tuple(use.sizes.items())): use for use in (*base.ops, *inner)}.values())
        return base._replace(ops=ops, matrices=tuple(self._matrices(base)))

    def _matrices(self, base: ModelOps) -> Iterator[Matrix]:
        """Those of a decoder, with the matrices of latent attention in the place of its own."""
        hidden, attention, rank = self.decoder.hidden_size, self.attention, self.attention.query_rank
        for matrix in base.matrices:
            prefix, _, name = matrix.names[0].rpartition(".")
            if prefix.endswith(".self_attn") and name == "q_proj":
                compressed = (f"{prefix}.kv_a_proj_with_mqa",)
                names = compressed if rank is None else (f"{prefix}.q_a_proj", *compressed)
                yield Matrix(names, hidden, attention.down, parts=attention.down_parts)
                queries, inputs = attention.query_projection
                yield Matrix((f"{prefix}.{queries}",), inputs, attention.heads * attention.query_dim)
                layer = prefix.removesuffix(".self_attn")
                index = int(layer.split(".")[2])
                for norm in self.gated_norms(index):
                    yield Matrix((f"{layer}.{norm}.mlp.fc1",), hidden, self.gate_rank)
                    yield Matrix((f"{layer}.{norm}.mlp.fc2",), self.gate_rank, hidden)
                if self.has_indexer(index):
                    for own, (inputs, outputs) in attention.indexer_projections.items():
                        yield Matrix((f"{prefix}.indexer.{own}",), inputs, outputs)
                if attention.gated:
                    yield Matrix((f"{prefix}.gate_proj",), hidden, attention.heads * attention.dims.value_dim)
            elif prefix.endswith(".self_attn"):
                yield matrix._replace(inputs=attention.heads * attention.dims.value_dim)
            else:
                yield matrix


def deepseek_config(
    config: Mapping[str, Any],
    routing: Callable[[Mapping[str, Any]], Routing],
    sparse: Callable[[Mapping[str, Any], int], tuple[bool, ...]] | None = None,
) -> DeepseekConfig:
    """From fields with all defaults filled in. Raises UnsupportedConfig with the field that is not implemented.

    `routing(config)`: how experts are chosen; it is called if a layer has any. `sparse(config, layers)`: which layers
    have experts; None: those from `first_k_dense_replace` on.
    """
    refuse_unless(config, SUPPORTED)
    rope_dim, heads = int(config["qk_rope_head_dim"]), int(config["num_attention_heads"])
    fields = {**config, "head_dim": rope_dim, "num_key_value_heads": heads}
    decoder = decoder_config(fields, COUNT_FIELDS)
    attention = latent_sizes(config, decoder.rope, INNER_NORM_EPS)
    moe_layers = (sparse or sparse_from)(config, decoder.layers)
    if any(moe_layers):
        decoder = decoder._replace(moe=_experts(config, routing(config)), moe_layers=moe_layers)
    return DeepseekConfig(decoder, attention)


def sparse_from(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: from `first_k_dense_replace` on."""
    dense = int(config.get("first_k_dense_replace") or 0)
    return tuple(index >= dense for index in range(layers))


def _experts(config: Mapping[str, Any], routing: Routing) -> MoEConfig:
    count, size = int(config["n_routed_experts"]), int(config["moe_intermediate_size"])
    groups, used = routing.groups, routing.top_groups
    if groups < 1 or count % groups or not 1 <= used <= groups:
        raise UnsupportedConfig(f"{count} experts cannot be in n_group = {groups} groups, of which topk_group = {used}")
    if not 1 <= routing.top_k <= count // groups * used:
        most = count // groups * used
        raise UnsupportedConfig(f"num_experts_per_tok = {routing.top_k} is not between 1 and {most} experts")
    shared = int(config.get("n_shared_experts") or 0) * size
    return MoEConfig(count, size, routing, shared, shared="shared_experts")


def groups_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """The number of groups of experts, and of those that a token uses."""
    return int(config["n_group"] or 1), int(config["topk_group"] or 1)

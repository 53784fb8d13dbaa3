"""The configuration of models with Mamba-2 layers: attention in the others, or beside them in every layer.

Torch-free; `mamba_layers` computes. Owns what Granite 4, Bamba and Falcon-H1 have in common; the file of each says what
it does otherwise. Raises UnsupportedConfig with the name of a field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.architectures.hybrid_config import HybridConfig
from srv.models.architectures.op_uses import (
    ADD_NORM,
    OUTPUT,
    feed_forward_matrices,
    feed_forward_ops,
    layer_experts,
    rotary,
)
from srv.models.blueprint import NORM, OpUse
from srv.models.derive import Matrix, ModelOps
from srv.models.layers.moe_config import MoEConfig
from srv.models.layers.recurrent_sizes import GATED_NORM, ScanSizes, StateSpaceSizes
from srv.models.layers.rope_config import UnsupportedConfig

_NO_LIMIT = (0.0, math.inf)


class LayerFactors(NamedTuple):
    """By which Falcon-H1 multiplies what its layers compute.

    `projected`: gates, values, b, c and steps of the Mamba-2 layer. `gate`: that of the MLP, before its activation.
    """

    mamba_in: float = 1.0
    projected: tuple[float, ...] = (1.0,) * 5
    mamba_out: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    mlp_out: float = 1.0


@dataclass(frozen=True)
class MambaConfig(HybridConfig):
    """`decoder` also has multipliers. `mamba`: the sizes of a Mamba-2 layer. `parallel`: layers with attention have one
    as well, whose result is added. `moe`: the mixture of experts that all layers have in place of the MLP. `mlp`: the
    name of the MLP in a layer. `factors`: None for none.
    """

    mamba: StateSpaceSizes
    moe: MoEConfig | None = None
    parallel: bool = False
    mlp: str = "mlp"
    factors: LayerFactors | None = None

    @property
    def recurs(self) -> tuple[bool, ...]:
        """Whether each layer has a Mamba-2 layer."""
        return tuple(self.parallel or not attends for attends in self.attends)

    @property
    def recurrent(self) -> StateSpaceSizes | None:
        """None if every layer has attention only (Granite 4 without Mamba)."""
        return self.mamba if any(self.recurs) else None

    @property
    def parameters(self) -> int:
        """The matrices, and norms, routers, biases and what Mamba-2 layers have beside."""
        sizes, hidden = self.decoder, self.decoder.hidden_size
        biases = sizes.qkv_size * sizes.qkv_bias + hidden * sizes.output_bias
        mixers = sum(self.attends) * biases + sum(self.recurs) * self.mamba.other_params(hidden)
        mlp = (2 * sizes.intermediate_size + hidden) * sizes.mlp_bias
        mlps = sizes.layers * (mlp if self.moe is None else self.moe.other_params(hidden))
        return sizes.embedding_parameters + self.projection_params + mixers + mlps + (2 * sizes.layers + 1) * hidden

    @property
    def projection_params(self) -> int:
        sizes, hidden = self.decoder, self.decoder.hidden_size
        dense = 3 * hidden * sizes.intermediate_size
        mlps = sizes.layers * (dense if self.moe is None else self.moe.projection_params(hidden))
        attention = 2 * hidden * (sizes.heads + sizes.kv_heads) * sizes.head_dim
        return mlps + sum(self.attends) * attention + sum(self.recurs) * self.mamba.projection_params(hidden)

    def model_ops(self, dtype: str) -> ModelOps:
        sizes, hidden = self.decoder, self.decoder.hidden_size
        ops = [OpUse(NORM, {"dim": hidden}), OpUse(ADD_NORM, {"dim": hidden}), *rotary(sizes)]
        if any(self.recurs):
            ops += mamba_ops(self.mamba)
        mixtures = [self.moe] * sizes.layers
        ops += feed_forward_ops(mixtures, sizes.intermediate_size)
        return ModelOps(tuple(ops), tuple(self._matrices()), layer_experts(mixtures, hidden))

    def _matrices(self) -> Iterator[Matrix]:
        """Those of linear layers, in the order of the checkpoint's layers; not those of experts."""
        sizes, hidden = self.decoder, self.decoder.hidden_size
        yield Matrix(("model.embed_tokens",), hidden, sizes.vocab_size, embedding=True)
        for index, (attends, recurs) in enumerate(zip(self.attends, self.recurs, strict=True)):
            prefix, heads = f"model.layers.{index}", sizes.heads * sizes.head_dim
            if recurs:
                yield Matrix((f"{prefix}.mamba.in_proj",), hidden, self.mamba.inputs)
                yield Matrix((f"{prefix}.mamba.out_proj",), self.mamba.scan.inner, hidden)
            if attends:
                qkv = tuple(f"{prefix}.self_attn.{name}_proj" for name in "qkv")
                yield Matrix(qkv, hidden, sizes.qkv_size, parts=sizes.qkv_parts)
                yield Matrix((f"{prefix}.self_attn.o_proj",), heads, hidden)
            name = "mlp" if self.moe else self.mlp
            yield from feed_forward_matrices(self.moe, f"{prefix}.{name}", hidden, sizes.intermediate_size)
        yield Matrix((OUTPUT,), hidden, sizes.vocab_size, tied=sizes.tied_embeddings)


def mamba_ops(sizes: StateSpaceSizes) -> Iterator[OpUse]:
    """Those of `srv.models.layers.state_space`, beside its matrices."""
    yield OpUse("causal_conv1d", {"channels": sizes.channels, "width": sizes.width})
    yield OpUse("state_space_scan", sizes.scan.op_sizes)
    if sizes.norm:
        dim = sizes.scan.inner // sizes.scan.groups
        yield OpUse(GATED_NORM, {"dim": dim}, own="torch's operator", always_own=True)


def mamba_sizes(config: Mapping[str, Any], inner: int) -> StateSpaceSizes:
    """Those that a configuration states, with the fields of Granite, Bamba and Falcon; `inner`: of all heads."""
    heads, groups = int(config["mamba_n_heads"]), int(config["mamba_n_groups"])
    dim = inner // heads if config["mamba_d_head"] == "auto" else int(config["mamba_d_head"])
    if heads * dim != inner:
        raise UnsupportedConfig(f"{heads} heads of {dim} (mamba_n_heads, mamba_d_head) are not {inner} in all")
    if groups < 1 or heads % groups:
        raise UnsupportedConfig(f"{heads} heads are not a multiple of {groups} groups (mamba_n_heads, mamba_n_groups)")
    _check_limit(config["time_step_limit"])
    bias = bool(config["mamba_proj_bias"])
    scan = ScanSizes(heads, groups, dim, int(config["mamba_d_state"]))
    return StateSpaceSizes(scan, int(config["mamba_d_conv"]), bool(config["mamba_conv_bias"]), bias, bias)


def _check_limit(limit: Any) -> None:
    """transformers clamps the steps of prompts only. Refuse limits that change any."""
    values = () if limit is None else tuple(limit)
    stated = tuple(float(each["__float__"] if isinstance(each, Mapping) else each) for each in values)
    if stated not in ((), _NO_LIMIT):
        raise UnsupportedConfig(f"time_step_limit = {list(stated)} is not implemented natively")


# The values that transformers uses for fields that a configuration of these families leaves out.
MAMBA_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": None,
    }
)

"""The configuration of models with Mamba-2 layers: attention in the others, or beside them in every layer.

Torch-free. Owns what Granite 4, Bamba and Falcon-H1 have in common; the file of each says what
it does otherwise. Raises UnsupportedConfig with the name of a field.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from srv.models.architectures import parts
from srv.models.architectures.hybrid_config import HybridConfig
from srv.models.blueprint import MLP, Attention, Layer, Linear, MoE, Part, Tensors
from srv.models.layers.moe_config import MoEConfig
from srv.models.layers.recurrent_sizes import ScanSizes, StateSpaceSizes
from srv.models.layers.rope_config import UnsupportedConfig
from srv.models.recurrent_parts import StateSpace

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

    @functools.cached_property
    def tree(self) -> Part:
        sizes = self.decoder
        return parts.decoder(sizes, parts.layers(self.attends, self._layer), parts.last_norm(sizes))

    def _layer(self, index: int) -> Layer:
        sizes, hidden, factors = self.decoder, self.decoder.hidden_size, self.factors or LayerFactors()
        if self.moe is None:
            mlp = parts.mlp(hidden, sizes.intermediate_size, sizes.mlp_bias, name=self.mlp)
            feeding: MLP | MoE = dataclasses.replace(mlp, gate_factor=factors.gate, factor=factors.mlp_out)
        else:
            feeding = parts.mixture(self.moe, hidden)
        mixers: list[Attention | StateSpace] = []
        if self.recurs[index]:
            mixers.append(state_space(self.mamba, hidden, sizes.norm_eps, factors.projected if self.factors else ()))
        if self.attends[index]:
            mixers.append(parts.attention(sizes, index))
        of_mamba, of_attention = (factors.mamba_in, factors.mamba_out), (factors.attention_in, factors.attention_out)
        scales = (of_mamba, of_attention) if len(mixers) > 1 else ()
        return dataclasses.replace(parts.pre_norm(sizes, mixers[0], feeding), mixers=tuple(mixers), scales=scales)


def state_space(sizes: StateSpaceSizes, hidden: int, eps: float, input_factors: tuple[float, ...] = ()) -> StateSpace:
    """A Mamba-2 layer."""
    scan, channels = sizes.scan, sizes.channels
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (channels, 1, sizes.width)}
    if sizes.conv_bias:
        shapes["conv1d.bias"] = (channels,)
    shapes |= dict.fromkeys(("dt_bias", "A_log", "D"), (scan.heads,))
    if sizes.norm:
        shapes["norm.weight"] = (scan.inner,)
    return StateSpace(
        Linear({"in_proj": sizes.inputs}, hidden, sizes.bias),
        Tensors(shapes),
        Linear({"out_proj": hidden}, scan.inner, sizes.output_bias),
        sizes,
        eps,
        input_factors,
        name="mamba",
    )


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

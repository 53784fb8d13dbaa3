"""Models with Mamba or Mamba-2 layers: attention in the others, or beside them in every layer.

Torch-free. Owns what Granite 4, Bamba, Falcon-H1, Nemotron-H and Jamba have in common; the file of each says what
it does otherwise. Raises UnsupportedConfig with the name of a field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srv.models.blueprint import Linear, Norm, Tensors
from srv.models.blueprint.recurrent import SelectiveScan, StateSpace
from srv.models.checkpoints.slices import Section
from srv.models.layers.recurrent_sizes import ScanSizes, SelectiveScanSizes, StateSpaceSizes
from srv.models.unsupported import UnsupportedConfig

_NO_LIMIT = (0.0, math.inf)


def state_space(
    sizes: StateSpaceSizes, hidden: int, eps: float, input_factors: tuple[float, ...] = (), name: str = "mamba"
) -> StateSpace:
    """A Mamba-2 layer."""
    scan, channels = sizes.scan, sizes.channels
    values, keys, heads = Section(scan.inner, scan.head_dim), Section(scan.keys, scan.state_size), Section(scan.heads)
    convolved = (values, keys, keys)
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (channels, 1, sizes.width)}
    if sizes.conv_bias:
        shapes["conv1d.bias"] = (channels,)
    shapes |= dict.fromkeys(("dt_bias", "A_log", "D"), (scan.heads,))
    if sizes.norm:
        shapes["norm.weight"] = (scan.inner,)
    return StateSpace(
        Linear({"in_proj": sizes.inputs}, hidden, sizes.bias, split="out", sections=((values, *convolved, heads),)),
        Tensors(shapes, divided=True, sections=dict.fromkeys(("conv1d.weight", "conv1d.bias"), convolved)),
        Linear({"out_proj": hidden}, scan.inner, sizes.output_bias, split="in"),
        sizes,
        eps,
        input_factors,
        name=name,
    )


def selective_scan(
    sizes: SelectiveScanSizes, hidden: int, bias: bool, norms: tuple[Norm, ...] = (), name: str = "mamba"
) -> SelectiveScan:
    """A Mamba layer. `bias`: of the projections of inputs and results. `norms`: of steps, b and c."""
    inner, state = sizes.channels, sizes.state_size
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (inner, 1, sizes.width)}
    if sizes.conv_bias:
        shapes["conv1d.bias"] = (inner,)
    shapes |= {"dt_proj.bias": (inner,), "A_log": (inner, state), "D": (inner,)}
    return SelectiveScan(
        Linear({"in_proj": 2 * inner}, hidden, bias, split="out", sections=((Section(inner), Section(inner)),)),
        Linear({"x_proj": sizes.rank + 2 * state}, inner, split="in"),
        norms,
        Linear({"dt_proj": inner}, sizes.rank, split="out"),
        Tensors(shapes, divided=True),
        Linear({"out_proj": hidden}, inner, bias, split="in"),
        sizes,
        name=name,
    )


def step_rank(stated: Any, hidden: int) -> int:
    """The rank of the projection of steps, from its field."""
    return math.ceil(hidden / 16) if stated == "auto" else int(stated)


def mamba_sizes(config: Mapping[str, Any], inner: int) -> StateSpaceSizes:
    """Those that a configuration states, with the fields of Granite, Bamba and Falcon; `inner`: of all heads."""
    heads, groups = int(config["mamba_n_heads"]), int(config["mamba_n_groups"])
    dim = inner // heads if config["mamba_d_head"] == "auto" else int(config["mamba_d_head"])
    if heads * dim != inner:
        raise UnsupportedConfig(f"{heads} heads of {dim} (mamba_n_heads, mamba_d_head) are not {inner} in all")
    if groups < 1 or heads % groups:
        raise UnsupportedConfig(f"{heads} heads are not a multiple of {groups} groups (mamba_n_heads, mamba_n_groups)")
    check_step_limit(config["time_step_limit"])
    bias = bool(config["mamba_proj_bias"])
    scan = ScanSizes(heads, groups, dim, int(config["mamba_d_state"]))
    return StateSpaceSizes(scan, int(config["mamba_d_conv"]), bool(config["mamba_conv_bias"]), bias, bias)


def check_step_limit(limit: Any) -> None:
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
# The sizes of Mamba-2 layers in the metadata of GGUF files.
GGUF_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "attention.head_count_kv": "gguf_kv_heads",
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.inner_size": "gguf_inner",
        "ssm.time_step_rank": "mamba_n_heads",
    }
)


def mamba_of_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a GGUF file with the fields that follow from `GGUF_FIELDS`."""
    inner = config["gguf_inner"]
    own = {"mamba_expand": inner / config["hidden_size"], "mamba_d_head": inner // config["mamba_n_heads"]}
    return {**{name: value for name, value in config.items() if not name.startswith("gguf_")}, **own}

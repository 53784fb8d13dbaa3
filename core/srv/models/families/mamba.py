"""Mamba and Mamba 2: recurrent layers alone. Its sizes alone are known. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Norm, Part
from srv.models.blueprint.recurrent import SelectiveScan, StateSpace
from srv.models.blueprint.without_layers import Group
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.mamba import selective_scan, state_space, step_rank
from srv.models.families.builders.without_layers import EPS, sizes
from srv.models.layers.recurrent_sizes import ScanSizes, SelectiveScanSizes, StateSpaceSizes


def mamba(c: Mapping[str, Any]) -> Part:
    inner, rank = int(c["expand"] * c["hidden_size"]), step_rank(c["time_step_rank"], c["hidden_size"])
    scan = SelectiveScanSizes(inner, c["state_size"], c["conv_kernel"], rank, bool(c["use_conv_bias"]))
    return _alone(c, selective_scan(scan, c["hidden_size"], bool(c["use_bias"])))


def mamba2(c: Mapping[str, Any]) -> Part:
    inner = int(c["expand"] * c["hidden_size"])
    scan = ScanSizes(c["num_heads"], c["n_groups"], inner // c["num_heads"], c["state_size"])
    bias = bool(c["use_bias"])
    made = StateSpaceSizes(scan, c["conv_kernel"], bool(c["use_conv_bias"]), bias, bias)
    return _alone(c, state_space(made, c["hidden_size"], EPS))


def _alone(c: Mapping[str, Any], mixer: SelectiveScan | StateSpace) -> Part:
    """Layers that are a mixer after a norm."""
    base = sizes({**c, "max_position_embeddings": 1, "num_attention_heads": 1, "intermediate_size": 0})
    norm = Norm(base.hidden_size, EPS, name="norm")
    layer = Group((norm, dataclasses.replace(mixer, name="mixer")))
    tree = parts.decoder(base, (layer,) * base.layers)
    return dataclasses.replace(tree, stack=dataclasses.replace(tree.stack, name="backbone"))


_MAMBA = {"expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
MAMBA = Architecture(
    name="MambaForCausalLM",
    tree=mamba,
    defaults={
        **_MAMBA,
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "state_size": 16,
        "time_step_rank": "auto",
        "tie_word_embeddings": True,
    },
    layers=None,
    model_type="mamba",
    runs_through_transformers=False,
)
MAMBA2 = Architecture(
    name="Mamba2ForCausalLM",
    tree=mamba2,
    defaults={
        **_MAMBA,
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "state_size": 128,
        "num_heads": 128,
        "n_groups": 8,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    layers=None,
    model_type="mamba2",
    runs_through_transformers=False,
)

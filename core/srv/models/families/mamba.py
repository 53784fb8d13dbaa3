"""Mamba and Mamba 2: recurrent layers alone. Its sizes alone are known. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders.mamba import state_space
from srv.models.families.builders.without_layers import EPS, alone, mamba1
from srv.models.layers.recurrent_sizes import ScanSizes, StateSpaceSizes


def mamba(c: Mapping[str, Any]) -> Part:
    rank = math.ceil(c["hidden_size"] / 16) if c["time_step_rank"] == "auto" else c["time_step_rank"]
    mixer = mamba1(
        c, "mixer", inner=int(c["expand"] * c["hidden_size"]), state=c["state_size"], rank=rank, width=c["conv_kernel"],
        conv_bias=c["use_conv_bias"], bias=c["use_bias"],
    )  # fmt: skip
    return alone(c, (mixer,) * c["num_hidden_layers"])


def mamba2(c: Mapping[str, Any]) -> Part:
    inner = int(c["expand"] * c["hidden_size"])
    scan = ScanSizes(c["num_heads"], c["n_groups"], inner // c["num_heads"], c["state_size"])
    bias = bool(c["use_bias"])
    mixer = state_space(
        StateSpaceSizes(scan, c["conv_kernel"], bool(c["use_conv_bias"]), bias, bias), c["hidden_size"], EPS
    )
    return alone(c, (mixer,) * c["num_hidden_layers"])


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

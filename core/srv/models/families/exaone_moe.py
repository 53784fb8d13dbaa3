"""K-EXAONE: EXAONE 4's attention, and DeepSeek-V3's experts from some layer on. Torch-free.

Layers of multi-token prediction are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes
from srv.models.families.builders.deepseek import feed_forward, sparse_layers
from srv.models.families.deepseek_v3 import routing
from srv.models.families.exaone import EXAONE_DEFAULTS, attention_of_layers
from srv.models.layers.moe_config import COUNT_FIELDS
from srv.models.unsupported import refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "attention_bias": (False,)})
    sizes = decoder_sizes(config, reads=COUNT_FIELDS)
    read = {**config, "n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    feeding = feed_forward(read, sizes, routing, sparse_layers(config, sizes.layers))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention_of_layers(config, sizes), feeding))


ARCHITECTURE = Architecture(
    name="ExaoneMoeForCausalLM",
    tree=tree,
    defaults={
        **EXAONE_DEFAULTS,
        "eos_token_id": 53,
        "mlp_layer_types": None,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    model_type="exaone_moe",
    published_names=("ExaoneMoEForCausalLM",),
    weights=(
        Rename({"model.layers.*.mlp.e_score_correction_bias": "model.layers.*.mlp.gate.e_score_correction_bias"}),
    ),
)

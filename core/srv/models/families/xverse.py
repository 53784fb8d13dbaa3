"""XVERSE: Llama, or Llama with experts and shared ones in every layer. transformers does not have it. Torch-free.

With experts, it computes what SGLang's `xverse_moe.py` does, which was contributed by the authors of the model: the
weights of a token's experts are their shares of the softmax over all experts, unless `norm_topk_prob` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MLP, MoE, Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes
from srv.models.families.builders.layer_types import check_experts
from srv.models.layers.moe_config import COUNT_FIELDS, Routing
from srv.models.unsupported import refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"bias": (False,), "attention_bias": (False,), "mlp_bias": (False,)})
    sizes = decoder_sizes(config, reads=COUNT_FIELDS)
    feeding: MLP | MoE = _experts(config, sizes) if config["num_experts"] else parts.mlp(sizes)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, parts.attention(sizes), feeding))


def _experts(config: Mapping[str, Any], sizes: Sizes) -> MoE:
    count, used, inner = int(config["num_experts"]), int(config["moe_top_k"]), sizes.intermediate_size
    check_experts(used, count)
    routing, shared = Routing(used, renormalize=bool(config["norm_topk_prob"])), int(config["num_shared_experts"] or 0)
    return parts.mixture(
        sizes, count, inner, routing, shared=shared * inner, shared_name="shared_experts", router="router"
    )


ARCHITECTURE = Architecture(
    name="XverseForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "num_experts": None,
        "num_shared_experts": None,
        "norm_topk_prob": False,
    },
    model_type="xverse",
    runs_through_transformers=False,
    published_names=("XverseMoeForCausalLM",),
)

"""Every class with native layers over several ranks: the logits of one rank, and the bytes that its facts say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from every import every
from gguf_cases import served_logits
from models_small import built
from small_configurations import configurations, for_two_ranks
from thread_ranks import on_ranks

from srv.dist.mesh import Mesh
from srv.models.base import CausalLM
from srv.models.facts.sharding import Divisions, divisions, rank_facts, rank_share
from srv.models.read import read_facts
from srv.specs import ModelFacts, Recurrent

# Fields with which four ranks divide what two can, too, and with which norms and groups of heads span ranks.
FOUR = {
    "Qwen3NextForCausalLM": {"linear_num_key_heads": 4},
    "GraniteMoeHybridForCausalLM": {"num_attention_heads": 4, "mamba_n_groups": 1},
    "FalconH1ForCausalLM": {"num_attention_heads": 4, "mamba_n_groups": 2, "mamba_rms_norm": True},
    "NemotronHForCausalLM": {"num_attention_heads": 4, "n_groups": 2, "moe_latent_size": 48, "mlp_bias": True},
    "JambaForCausalLM": {"num_attention_heads": 4, "head_dim": 32},
    "MiniMaxForCausalLM": {},
    "RecurrentGemmaForCausalLM": {},
    "Lfm3ForCausalLM": {"use_attention_gate": True},
    "OlmoHybridForCausalLM": {"num_attention_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
FAST = (
    *("Qwen3_5MoeForCausalLM", "BambaForCausalLM", "JambaForCausalLM", "MiniMaxForCausalLM"),
    *("BertModel", "ModernBertForSequenceClassification", "MPNetModel"),
)


def check(folder: Path, name: str, fields: dict[str, Any], ranks: int) -> None:
    """Random weights, of which each rank has its part."""
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": [name]}, default=str))
    facts = read_facts(folder)
    sizes = divisions(facts, in_blocks=True)
    assert isinstance(sizes, Divisions)
    assert sizes.obstacles(Mesh(ranks)) == []
    options: dict[str, Any] = {"load_format": "dummy", "seed": 3}
    tokens = torch.randint(3, 90, (20,), generator=torch.Generator().manual_seed(1))
    one, own = built(folder, **options), rank_facts(facts, ranks)
    expected = served_logits(one, facts, tokens)

    def run(part: CausalLM) -> tuple[int, torch.Tensor]:
        return part.loaded_bytes(), served_logits(part, own, tokens)

    found = on_ranks(ranks, lambda group, comm: run(built(folder, group=group, communicator=comm, **options)))
    for held, logits in found:
        assert float((logits - expected).norm() / expected.norm()) < 1e-4
        assert torch.equal(logits, found[0][1]), "ranks sample from different logits"
        assert held == round(one.loaded_bytes() * rank_share(facts, Mesh(ranks)))


def state_bytes(facts: ModelFacts) -> int:
    return sum(group.bytes_per_slot() for group in facts.cache_groups if isinstance(group, Recurrent))


@every("name", FAST)
def test_two_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    check(tmp_path, name, for_two_ranks(configurations()[name]), 2)


@pytest.mark.slow
@every("name", [name for name in configurations() if name not in FAST])
def test_two_ranks_compute_what_one_does_in_other_classes(name: str, tmp_path: Path) -> None:
    check(tmp_path, name, for_two_ranks(configurations()[name]), 2)


@pytest.mark.slow
@every("name", FOUR)
def test_four_ranks_divide_states(name: str, tmp_path: Path) -> None:
    """Groups of heads with one b and c are copied where there are fewer than ranks, and their norms span ranks."""
    fields = {**for_two_ranks(configurations()[name]), **FOUR[name]}
    check(tmp_path, name, fields, 4)
    facts = read_facts(tmp_path)
    groups = fields.get("n_groups", fields.get("mamba_n_groups", 4))
    whole, part = state_bytes(facts), state_bytes(rank_facts(facts, 4))
    assert whole == part * 4 if groups % 4 == 0 else whole < part * 4 < 2 * whole


def test_obstacles_of_recurrent_layers(tmp_path: Path) -> None:
    fields = {**configurations()["GraniteMoeHybridForCausalLM"], "mamba_n_groups": 8, "num_attention_heads": 12}
    fields |= {"num_key_value_heads": 3, "vocab_size": 96, "intermediate_size": 96, "shared_intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["GraniteMoeHybridForCausalLM"]}))
    sizes = divisions(read_facts(tmp_path), in_blocks=True)
    assert isinstance(sizes, Divisions)
    assert sizes.obstacles(Mesh(3)) == [
        "its 32 heads of state-space layers are not a multiple of 3",
        "its 8 groups of state-space heads can neither be divided among 3 ranks nor copied evenly",
    ]

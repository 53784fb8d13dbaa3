"""Mixtures whose experts are distributed over ranks: each has whole experts, or slices of some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from every import every
from model_cells import random_model
from models_small import built, our_logits
from thread_ranks import on_mesh, part_of
from torch import Tensor

from srv.dist.mesh import Axis, Mesh
from srv.models.base import CausalLM
from srv.models.facts.sharding import divisions, rank_share
from srv.models.layers.context import JoinedGroup
from srv.models.read import read_facts


@every(
    ("kind", "experts"),
    [("qwen3_moe", "num_experts"), ("glm4_moe", "n_routed_experts"), ("gpt_oss", "num_local_experts")],
)
def test_experts_are_distributed_over_ranks(kind: str, experts: str, tmp_path: Path) -> None:
    """Whole experts or slices of some, each loaded once by the ranks that have it; logits are those of one rank."""
    random_model(kind, vocab_size=96, num_attention_heads=8, num_key_value_heads=4, **{experts: 8}).save_pretrained(
        tmp_path
    )
    facts, one = read_facts(tmp_path), built(tmp_path)
    views, tokens = one.weight_views(), torch.arange(11) * 7 % 90
    expected = our_logits(one, tokens)

    def computed(groups: Mapping[Axis, JoinedGroup]) -> tuple[CausalLM, Tensor]:
        model = built(tmp_path, **groups["tensor"]._asdict(), groups=groups)
        return model, our_logits(model, tokens)

    for mesh in (Mesh(2, experts=2), Mesh(4, experts=2), Mesh(4, experts=4)):
        sizes = divisions(facts, in_blocks=False)
        assert not isinstance(sizes, str)
        assert not sizes.obstacles(mesh)
        parts = on_mesh(mesh, computed)
        names = [name for model, _ in parts for name in model.weight_views() if ".experts." in name]
        assert {names.count(name) for name in names} == {mesh.width("slices")}
        assert {name for name in views if ".experts." in name} == set(names)
        for model, logits in parts:
            slices, own = model.weight_slices(), model.weight_views()
            assert all(torch.equal(own[name], part_of(views[name], slices.get(name))) for name in own)
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
        held = [sum(tensor.numel() for tensor in model.weight_views().values()) for model, _ in parts]
        assert held == [pytest.approx(facts.parameters * rank_share(facts, mesh))] * mesh.tensor

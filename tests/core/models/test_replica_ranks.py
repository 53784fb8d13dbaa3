"""Ranks of several replicas: attention of one's own tokens, and everything else together with the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from every import every
from model_cells import random_model
from models_small import built, our_logits
from thread_ranks import on_mesh
from torch import Tensor

from srv.dist.agreement import StepShape
from srv.dist.mesh import Axis, Mesh
from srv.models.facts.sharding import divisions, rank_share
from srv.models.layers.context import JoinedGroup
from srv.models.read import read_facts

MESHES = (
    Mesh(2, replicas=2),
    Mesh(2, replicas=2, own_vocabulary=True),
    Mesh(4, replicas=2, own_vocabulary=True),
    Mesh(4, replicas=2, experts=4),
)


SIZES = {"vocab_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64}
SHAPE = StepShape(16, 16, decodes=False)  # of more tokens than any replica has


@every("kind", ["llama", "qwen3_moe", "cohere", "gemma3_text"])
def test_replicas_compute_their_own_tokens(kind: str, tmp_path: Path) -> None:
    """Of different numbers: each gets the logits that one rank gives, and holds what the facts say."""
    random_model(kind, **SIZES, **({"num_experts": 8} if kind == "qwen3_moe" else {})).save_pretrained(tmp_path)
    facts, one = read_facts(tmp_path), built(tmp_path)
    prompts = [torch.arange(11) * 7 % 90, torch.arange(9) * 11 % 90]
    expected = [our_logits(one, prompt) for prompt in prompts]
    sizes = divisions(facts, in_blocks=False)
    assert not isinstance(sizes, str)
    for mesh in MESHES:
        if mesh.experts > 1 and kind != "qwen3_moe":
            continue
        assert not sizes.obstacles(mesh)

        def computed(groups: Mapping[Axis, JoinedGroup], mesh: Mesh = mesh) -> tuple[int, int, Tensor]:
            model, replica = built(tmp_path, **groups["tensor"]._asdict(), groups=groups), groups["replicas"].group.rank
            return replica, model.loaded_bytes(), our_logits(model, prompts[replica], shape=SHAPE)

        results = on_mesh(mesh, computed)
        assert sorted(replica for replica, _, _ in results) == sorted([0, 1] * (mesh.tensor // 2))
        for replica, held, logits in results:
            torch.testing.assert_close(logits, expected[replica], atol=3e-4, rtol=1e-3)
            assert held == pytest.approx(facts.parameters * 4 * rank_share(facts, mesh))

"""DeepSeek-V2, V3 and MiniCPM 3 against transformers: logits, sizes and tensors, through the CPU's attention."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_small import COMMON, MODELS, YARN, small
from every import every
from latent_steps import Steps
from models_reference_ops import reference_ops
from models_small import HOST, built, expected_logits, tokens_of
from planned_sizes import check_sizes
from thread_ranks import ThreadCommunicator, on_ranks
from torch import Tensor

from srv.dist.group import RankGroup
from srv.models import derive
from srv.models.build import load_layers
from srv.models.checkpoints.slices import Slice
from srv.models.families.trees import native_tree
from srv.models.layers.context import BuildContext
from srv.models.layers.factory import LayerFactory
from srv.models.read import read_facts
from srv.models.unsupported import InvalidConfig, UnsupportedConfig
from srv.specs import Latent


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    found = {}
    for kind in MODELS:
        model, folder = small(kind), tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        found[kind] = model, folder
    return found


@every("kind", list(MODELS))
def test_logits_are_those_of_transformers(folders: dict[str, tuple[Any, Path]], kind: str) -> None:
    """In one pass; then in chunks, beside another row, and token by token after a prefix of shared pages."""
    reference, folder = folders[kind]
    facts, tokens = read_facts(folder), tokens_of(reference)
    expected = expected_logits(reference, tokens)
    assert facts.cache_groups == (Latent((0, 1, 2), 16, 16),)
    steps = Steps(model := built(folder), facts.cache_groups[0])
    close = {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(steps.run([([9, 2, 7, 1, 8, 3], tokens, 0)]), expected, **close)
    chunked = [steps.run([([11, 12, 13, 14, 15, 16], tokens[:7], 0)])]
    both = steps.run([([11, 12, 13, 14, 15, 16], tokens[7:20], 7), ([9, 2, 20, 21, 22, 23], tokens[8:], 8)])
    torch.testing.assert_close(both[13:], expected[8:], **close)
    chunked.append(both[:13])
    pages = [11, 12, 13, 14, 15, 16]
    for done in range(20, 24):
        row = (pages, tokens[done : done + 1], done)
        chunked.append(steps.run([row, ([9, 2, 7, 1, 8, 3, 30], tokens[:1], 24)])[:1])
    torch.testing.assert_close(torch.cat(chunked), expected, **close)
    assert model.loaded_bytes() == facts.weight_bytes == 4 * reference.num_parameters() + _buffer_bytes(reference)
    check_sizes(folder, model)


def _buffer_bytes(model: Any) -> int:
    return sum(each.nbytes for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))


@every("kind", ["v2", "v3"])
def test_ranks_hold_parts_of_heads_and_experts_and_the_same_latents(
    folders: dict[str, tuple[Any, Path]], kind: str
) -> None:
    """The parameters of two parts are those of the model, and what both have."""
    fields = {**read_facts(folders[kind][1]).config, "vocab_size": 96}
    tree = native_tree(type(folders[kind][0]).__name__, fields)
    part, whole = tree.of_rank(2), derive.attention_layers(tree)[0]
    assert (derive.attention_layers(part)[0].heads, whole.heads) == (3, 6)
    assert derive.attention_layers(part)[0].latent == whole.latent
    assert whole.kv_heads == derive.attention_layers(part)[0].kv_heads == 1
    ranks = RankGroup(rank=0, size=2), RankGroup(rank=1, size=2)
    context = [BuildContext(HOST, torch.float32, reference_ops(), group) for group in ranks]
    models = [load_layers(type(folders[kind][0]).__name__)(tree, LayerFactory(each), 64) for each in context]
    assert [model.loaded_bytes() for model in models] == [4 * derive.parameters(part)] * 2
    ups = [dict(enumerate(up for _, up in model.up_projections())) for model in models]  # type: ignore[attr-defined]
    assert [tuple(up[0].shape) for up in ups] == [(3, 22, 16)] * 2
    assert models[1].weight_slices()["model.layers.0.self_attn.kv_b_proj.weight"] == Slice(0, 66, 132, 132)


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Heads, experts, the shared expert and the vocabulary are divided; each rank has the compressed vectors."""
    reference = small("v3", vocab_size=96)
    reference.save_pretrained(tmp_path)
    tokens, latents = tokens_of(reference), read_facts(tmp_path).cache_groups[0]
    assert isinstance(latents, Latent)

    def run(group: RankGroup, communicator: ThreadCommunicator) -> Tensor:
        steps = Steps(built(tmp_path, group=group, communicator=communicator), latents)
        return torch.cat((steps.run([([3, 4], tokens[:7], 0)]), steps.run([([3, 4], tokens[7:8], 7)])))

    for logits in on_ranks(2, run):
        torch.testing.assert_close(logits, expected_logits(reference, tokens)[:8], atol=2e-4, rtol=1e-4)


@every("architecture,fields,reason", [
    ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "mlp_bias = True"),
    ("DeepseekV3ForCausalLM", {"rope_interleave": False}, "rope_interleave = False"),
    ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("DeepseekV3ForCausalLM", {"n_group": 3}, "8 experts cannot be in n_group = 3 groups"),
    ("DeepseekV3ForCausalLM", {"topk_group": 9}, "topk_group = 9"),
    ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 is not between 1 and 4"),
    ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, "kv_lora_rank = 0 is not a size"),
    ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("MiniCPM3ForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("MiniCPM3ForCausalLM", {"dim_model_base": -1}, "dim_model_base = -1 is not a positive number"),
])  # fmt: skip
def test_what_is_not_implemented_is_named(architecture: str, fields: dict[str, Any], reason: str) -> None:
    config = {**COMMON, "n_group": 4, "topk_group": 2, "q_lora_rank": None, **fields}
    config["routed_scaling_factor"] = 1.0
    with pytest.raises((InvalidConfig, UnsupportedConfig), match=re.escape(reason)):
        native_tree(architecture, config)


def test_yarn_scales_scores_by_the_square_of_its_factor() -> None:
    """DeepSeek's scores have a factor of their own, beside the one in cosines and sines."""
    plain = native_tree("DeepseekV3ForCausalLM", {**COMMON, "n_group": 4, "topk_group": 2})
    yarn = native_tree("DeepseekV3ForCausalLM", {**COMMON, "n_group": 4, "topk_group": 2, "rope_parameters": YARN})
    scale = derive.attention_layers(yarn)[0].scale / derive.attention_layers(plain)[0].scale
    assert scale == pytest.approx((0.1 * 0.9 * math.log(4) + 1) ** 2)

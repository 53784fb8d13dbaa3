"""Served models with latent attention: greedy tokens are those of transformers, however requests are scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_small import COMMON, small
from engine_small import Small, SmallModels, engine, messages, saved_small
from models_small import randomized
from oracle_drafter import oracle
from transformers import AutoModelForCausalLM, DeepseekV3Config

from srv.errors import Refusal

LENGTHS = (1, 5, 17, 40, 33)
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """DeepSeek-V3 with experts."""
    return saved_small(small("v3"), tmp_path_factory.mktemp("v3"), LENGTHS)


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """DeepSeek-V2, whose experts are chosen from groups by their largest score."""
    return saved_small(small("v2"), tmp_path_factory.mktemp("v2"), LENGTHS)


@pytest.fixture(scope="module")
def v2_lite(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Without groups and without low-rank queries, with YaRN."""
    return saved_small(small("v2-lite"), tmp_path_factory.mktemp("v2-lite"), LENGTHS)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Without experts, so that most operators of a step are native and steps are captured."""
    return _without_experts(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """With keys and values of 16 elements per head, which the native kernel computes for prompts."""
    return _without_experts(tmp_path_factory.mktemp("packed"), kv_lora_rank=32, qk_nope_head_dim=16, v_head_dim=16)


def _without_experts(folder: Path, **sizes: int) -> Small:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{**COMMON, "first_k_dense_replace": 3, **sizes}, n_group=1, topk_group=1, q_lora_rank=32
    )
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))
    return saved_small(model, folder, LENGTHS)


def served(running: Any, expected: Small) -> list[int]:
    """All requests at once, twice, compared; the cached tokens of the second time."""
    for _ in range(2):
        results = running.generate(messages(expected.prompts))
        assert [result.tokens for result in results] == expected.tokens
    return [result.cached_tokens for result in results]


@pytest.mark.parametrize("kind", ["mixture", "v2", "v2_lite"])
def test_chunks_batches_and_prefix_hits_give_the_tokens_of_transformers(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """The native kernel, with prompts in chunks that end within pages."""
    model: Small = request.getfixturevalue(kind)
    with engine(model, page=16, chunk=9) as running:
        assert running.context.resolved.config.platform.attention_backend == "native"
        assert max(served(running, model)) >= 32


def test_torch_operators_give_the_same_with_drafts(mixture: Small) -> None:
    with engine(
        mixture, page=4, chunk=64, attention_backend="torch_native", disable_mla_ragged_prefill=True, **DRAFTS
    ) as running:
        oracle(running, messages(mixture.prompts), mixture.tokens, wrong=5)
        assert max(served(running, mixture)) >= 36
        assert running.stats().drafts_accepted > 0


@pytest.mark.parametrize("chunk", [9, 64])
def test_prompts_whose_keys_and_values_are_computed_give_the_tokens_of_transformers(packed: Small, chunk: int) -> None:
    """Whole prompts, chunks and prefix hits; rows of 1 to 40 tokens, with and without a prefix, take both forms."""
    with engine(packed, page=16, chunk=chunk) as running:
        assert running.context.resolved.config.platform.attention_backend == "native"
        (says,) = (each.because for each in running.context.kernels.kernels if each.key.startswith("attention prefill"))
        assert "rows of at least 15 new tokens compute the keys and values of each head" in says
        assert max(served(running, packed)) >= 32


@pytest.mark.parametrize("flag", ["disable_mla_ragged_prefill", "disable_chunked_prefix_cache"])
def test_the_form_that_a_user_chooses_gives_the_same(packed: Small, flag: str) -> None:
    with engine(packed, page=16, chunk=64, **{flag: True}) as running:
        assert running.context.resolved.config.platform.attention_backend == "native"
        served(running, packed)


def test_how_prompts_are_computed_is_refused_where_it_has_no_effect(mixture: Small, small_models: SmallModels) -> None:
    """By name: other models have no latent attention, and rows with the same bits in any batch have one form."""
    flag = {"disable_mla_ragged_prefill": True}
    whole = {"disable_chunked_prefix_cache": True, "enable_deterministic_inference": True}
    reason = "it computes no keys and values of a prefix, because enable_deterministic_inference is set"
    with pytest.raises(Refusal, match=reason), engine(mixture, page=16, **whole):
        pass
    both = {"disable_chunked_prefix_cache": True, "disable_mla_ragged_prefill": True}
    with pytest.raises(Refusal, match="all rows attend to the compressed vectors"), engine(mixture, page=16, **both):
        pass
    with (
        pytest.raises(Refusal, match=r"no layer of the model has latent attention \(MLA\)"),
        engine(small_models("llama"), attention_backend="torch_native", **flag),
    ):
        pass


def test_captured_steps_and_retractions_give_the_same(dense: Small) -> None:
    """A pool for fewer tokens than all requests need."""
    with engine(dense, page=16, chunk=16, pool=128, schedule_conservativeness=0.01) as running:
        served(running, dense)
        stats = running.stats()
        assert stats.retractions > 0
        assert stats.replayed_steps > 0

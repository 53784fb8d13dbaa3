"""What the support matrix shows of models with latent attention and with recurrent states, on the path of a user who
sets only the model.

As `tests/core/engine/test_model_cells.py`: log-probabilities are as close to those of transformers in float32 as
transformers itself is in bfloat16. The second time, the longest prompt begins with a cached page, and output is
computed in replayed steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_small import EXPERTS, GROUPS, YARN
from model_cells import (
    Combined,
    assert_as_close_as_transformers,
    decided,
    random_model,
    requests,
    rounded,
    save_bfloat16,
    served,
)
from models_small import GRANITE

from srv_matrix.pytest_plugin import covers
from srv_npu.facts import VARIANTS

pytestmark = pytest.mark.timeout(600)

COUNT = 8
LENGTHS = (1, 5, 17, 33, 150)
LATENT = {
    **EXPERTS,
    **GROUPS,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
    "pad_token_id": 0,
}
DELTA = {
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MIXED = {
    **{"head_dim": 64, "num_experts": COUNT, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
V3 = {"rope_parameters": YARN, "attention_bias": True}
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "v2": (
        "DeepseekV2ForCausalLM",
        lambda: decided("deepseek_v2", COUNT, **LATENT, topk_method="group_limited_greedy"),
    ),
    "v3": ("DeepseekV3ForCausalLM", lambda: decided("deepseek_v3", COUNT, **LATENT, **V3)),
    "qwen3-next": ("Qwen3NextForCausalLM", lambda: decided("qwen3_next", COUNT, **MIXED, **DELTA)),
    "qwen3.5": ("Qwen3_5ForCausalLM", lambda: rounded(random_model("qwen3_5", head_dim=64, **DELTA))),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", lambda: decided("qwen3_5_moe", COUNT, **MIXED, **DELTA)),
    "lfm2": ("Lfm2ForCausalLM", lambda: rounded(random_model("lfm2"))),
    "lfm2-moe": ("Lfm2MoeForCausalLM", lambda: rounded(random_model("lfm2_moe"))),
    "olmo-hybrid": ("OlmoHybridForCausalLM", lambda: rounded(random_model("olmo_hybrid"))),
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        lambda: rounded(random_model("granitemoehybrid", **GRANITE, mamba_n_heads=16)),
    ),
    "bamba": ("BambaForCausalLM", lambda: rounded(random_model("bamba", mamba_n_heads=16))),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        lambda: rounded(random_model("falcon_h1", mamba_n_heads=16, mamba_d_ssm=128)),
    ),
    "minimax": ("MiniMaxForCausalLM", lambda: rounded(random_model("minimax"))),
}
# As on the CPU, a few tokens of the delta rule have large errors in any rounding.
OF: dict[str, Combined] = dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-moe"), statistics.fmean)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=covers(f"model:{cell}/safetensors", platform="npu"))
        for name, (cell, _) in MODELS.items()
    ],
)
def test_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("v2", ["--speculative-algorithm=NGRAM", "--disable-graphs"]),
        ("v3", ["--max-running-requests=3", "--disable-overlap-schedule"]),
        ("qwen3-next", ["--max-running-requests=3"]),
    ],
)
def test_prompts_in_chunks_that_end_within_pages(name: str, flags: list[str], tmp_path: Path) -> None:
    """Chunks of 48 tokens and less, of which short ones are absorbed and long ones materialised; and drafts."""
    check(name, tmp_path, "--chunked-prefill-size=48", *flags)


def check(name: str, folder: Path, *flags: str) -> None:
    with torch.inference_mode(False):
        model = MODELS[name][1]()
        save_bfloat16(model, folder)
        with served(folder, "--max-total-tokens=4096", *flags, device="npu") as engine:
            assert engine.context.device.variant in VARIANTS
            assert engine.context.resolved.config.model.dtype == "bfloat16"
            computed = engine.generate(requests(LENGTHS, prompt_logprobs=0))
            cached = engine.generate(requests(LENGTHS))
            assert (engine.stats().replayed_steps > 0) is ("--disable-graphs" not in flags)
        of = OF.get(name, max)
        assert [result.cached_tokens for result in cached] == [0, 0, 0, 0, 128]
        assert_as_close_as_transformers(computed, model, of=of, lengths=LENGTHS)
        assert_as_close_as_transformers(cached, model, of=of, lengths=LENGTHS)

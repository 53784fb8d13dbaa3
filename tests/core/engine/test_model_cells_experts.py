"""What the support matrix shows as verified of mixtures of experts, on the path of a user who sets only the model.

As `test_model_cells.py`. Rounding to bfloat16 would change which experts a token uses wherever two are about equally
good, and then no error is small: in these models no two are, since each token's embedding says which experts it uses.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_small import EXPERTS, GROUPS, YARN
from gguf import GGMLQuantizationType
from model_cells import (
    assert_as_close_as_transformers,
    assert_fast_path,
    decided,
    requests,
    save_bfloat16,
    served,
)
from models_small import write_gguf
from mxfp4_weights import save_mxfp4_experts

from srv.quantization.layers.blocks import GGUFExperts
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")

COUNT = 8
SHARED = {"shared_expert_intermediate_size": 32}
QWEN = {"head_dim": 64, "num_experts": COUNT, "moe_intermediate_size": 32}
DEEPSEEK = {
    **EXPERTS,
    **GROUPS,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 64,
    "pad_token_id": 0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"head_dim": 64, "num_local_experts": COUNT}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**QWEN, **SHARED, "num_experts_per_tok": 3}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**QWEN, "num_experts_per_tok": 2, "norm_topk_prob": True}),
}
# Prompts of up to 40 tokens choose 9 keys. A rounding that changes the choice changes a key of a small weight.
INDEX = {"index_n_heads": 24, "index_head_dim": 64, "index_topk": 9, "pad_token_id": None}
UNGROUPED = {"n_group": 1, "topk_group": 1}
CHOOSING: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", {**DEEPSEEK, **INDEX, "rope_parameters": YARN}),
    "axk2": ("AXK2ForCausalLM", {**DEEPSEEK, **INDEX, **UNGROUPED, "rope_parameters": YARN}),
    "hy_v4": ("HYV4ForCausalLM", {**DEEPSEEK, **INDEX, **UNGROUPED, "indexer_types": ["full", "shared", "full"]}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {**DEEPSEEK, **INDEX, "indexer_types": ["full", "shared", "full"]}),
}
GPT_OSS = {
    "head_dim": 64,
    "num_local_experts": COUNT,
    "num_experts_per_tok": 2,
    "sliding_window": 9,  # shorter than most prompts
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "pad_token_id": 0,
}
GGUF = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=covers(f"model:{cell}/safetensors", platform="cpu"))
        for kind, (cell, _) in CHOOSING.items()
    ],
)
def test_a_bfloat16_checkpoint_with_an_indexer(kind: str, tmp_path: Path) -> None:
    """The second time, prompts begin with cached pages. Only `torch_native` chooses keys, in eager steps."""
    model = decided(kind, COUNT, **CHOOSING[kind][1])
    save_bfloat16(model, tmp_path)
    with served(tmp_path, "--max-total-tokens=2048") as engine:
        computed = engine.generate(requests(prompt_logprobs=0))
        cached = engine.generate(requests())
    assert cached[-1].cached_tokens == 32
    assert_as_close_as_transformers(computed, model, of=statistics.fmean)
    assert_as_close_as_transformers(cached, model, of=statistics.fmean)


@pytest.mark.slow
@covers("model:GptOssForCausalLM/safetensors", platform="cpu")
def test_a_bfloat16_checkpoint_with_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published. transformers has the dequantized weights."""
    model = decided("gpt_oss", COUNT, **GPT_OSS)
    save_mxfp4_experts(model, tmp_path, torch.bfloat16, lowest=-7)
    with served(tmp_path, "--max-total-tokens=2048") as engine:
        assert_fast_path(engine)
        worker = engine.executor.worker  # type: ignore[attr-defined]
        experts = [module for module in worker.loaded.model.modules() if isinstance(module, GGUFExperts)]
        assert [(each.gate_up_type, each.down_type) for each in experts] == [("MXFP4", "MXFP4")] * 3
        computed = engine.generate(requests(prompt_logprobs=0))
        cached = engine.generate(requests())
        assert engine.stats().replayed_steps > 0
    assert cached[-1].cached_tokens == 32
    assert_as_close_as_transformers(computed, model)
    assert_as_close_as_transformers(cached, model)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[
                covers(f"model:{cell}/gguf", platform="cpu"),
                *([] if kind == "qwen3_moe" else [pytest.mark.slow]),
            ],
        )
        for kind, (cell, _) in KINDS.items()
    ],
)
def test_a_gguf_file_of_blocks(kind: str, tmp_path: Path) -> None:
    """Native kernels multiply its blocks of 8 bits (Q8_0) by inputs that they round to 8 bits as well."""
    model = decided(kind, COUNT, **KINDS[kind][1])
    config = model.config
    fields = {"expert_count": COUNT, "expert_used_count": config.num_experts_per_tok}
    if kind != "mixtral":
        fields["expert_feed_forward_length"] = config.moe_intermediate_size
    if kind == "qwen2_moe":
        fields["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    metadata: dict[str, Any] = {f"ARCH__{name}": value for name, value in fields.items()}
    with torch.no_grad():
        write_gguf(tmp_path / "small.gguf", model, GGUF[kind], GGMLQuantizationType.Q8_0, **metadata)
    with served(tmp_path / "small.gguf", "--max-total-tokens=2048") as engine:
        assert_fast_path(engine)
        assert not engine.context.resolved.config.weights.dequantize_weights
        results = engine.generate(requests(prompt_logprobs=0))
    assert_as_close_as_transformers(results, model, 6.0)

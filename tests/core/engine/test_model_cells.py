"""What the support matrix shows as verified of models, on the path of a user who sets nothing but the model.

The checkpoints are in bfloat16, with head sizes that the CPU's native attention takes, as those of users are, and each
test asserts that this path ran. bfloat16 leaves no tokens to compare: the log-probabilities must be as close to those
of transformers in float32 as transformers itself is in bfloat16. Exact comparisons in float32 are in
`test_small_model.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bfloat16_models import MODELS, PAD, Model
from gguf import GGMLQuantizationType
from model_cells import (
    assert_as_close_as_transformers,
    assert_fast_path,
    random_model,
    requests,
    rounded,
    save_bfloat16,
    served,
)
from models_small import GRANITE, write_gguf

from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")

OF_GGUF = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
}
POOL = "--max-total-tokens=2048"
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0}
FIELDS_OF_GGUF: dict[str, dict[str, Any]] = {
    "granite": GRANITE,
    "smollm3": {"num_hidden_layers": 4},
    "gemma3": {"num_hidden_layers": 7, "query_pre_attn_scalar": 16},
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 6, "pad_token_id": 0, **CAPS},
    "olmo2": {"pad_token_id": 0},
    "ernie4_5": {"head_dim": 64, "pad_token_id": 0},
}


# Without native layers: through transformers.
GENERIC = Model("vaultgemma", {**PAD, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 5})
# With few formats and few platforms: its attention caps scores that grow with the position.
GROK = Model("git", {"head_dim": 64, "moe_intermediate_size": 32, "num_local_experts": 8}, 8)
CHECKPOINTS = {**MODELS, "any other decoder": GENERIC, "Grok1ForCausalLM": GROK}
FAST = ("LlamaForCausalLM", "Qwen3MoeForCausalLM")
# Attention is on torch's operators: with ALiBi, and with values of another size than keys.
ON_TORCH = ("BloomForCausalLM", "MptForCausalLM", "MiMoV2FlashForCausalLM")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                covers(f"model:{name}/safetensors", platform="cpu"),
                *([] if name in FAST else [pytest.mark.slow]),
            ],
        )
        for name in CHECKPOINTS
    ],
)
def test_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    """The second time, prompts begin with cached pages, and steps of up to 16 rows are replayed."""
    model = CHECKPOINTS[name].made()
    save_bfloat16(model, tmp_path)
    with served(tmp_path, POOL) as engine:
        if name not in ON_TORCH:
            assert_fast_path(
                engine, "NativeLatentAttention" if "kv_lora_rank" in CHECKPOINTS[name].fields else "NativeAttention"
            )
        computed = engine.generate(requests(prompt_logprobs=0))
        cached = engine.generate(requests())
        assert (engine.stats().replayed_steps > 0) is (name not in ON_TORCH)
    assert cached[-1].cached_tokens == 32
    for results in (computed, cached):
        assert_as_close_as_transformers(results, model, of=CHECKPOINTS[name].of)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[
                covers(f"model:{cell}/gguf", platform="cpu"),
                *([] if kind == "llama" else [pytest.mark.slow]),
            ],
        )
        for kind, cell in OF_GGUF.items()
    ],
)
def test_a_gguf_file_of_blocks(kind: str, tmp_path: Path) -> None:
    """Native kernels multiply its blocks of 8 bits (Q8_0) by inputs that they round to 8 bits as well."""
    model = rounded(random_model(kind, **FIELDS_OF_GGUF.get(kind, {})))
    metadata = {f"ARCH__{name}": value for name, value in CAPS.items()} if kind == "gemma2" else {}
    write_gguf(tmp_path / "small.gguf", model, kind, GGMLQuantizationType.Q8_0, **metadata)
    with served(tmp_path / "small.gguf", POOL) as engine:
        assert_fast_path(engine)
        assert not engine.context.resolved.config.weights.dequantize_weights
        results = engine.generate(requests(prompt_logprobs=0))
    assert_as_close_as_transformers(results, model, 6.0)

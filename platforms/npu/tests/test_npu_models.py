"""What the support matrix shows of models on NPUs, on the path of a user who sets only the model.

As `tests/core/engine/test_model_cells.py`: log-probabilities are as close to those of transformers in float32 as
transformers itself is in bfloat16. The second time, the longest prompt begins with a cached page, and output is
computed in replayed steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bfloat16_models import MODELS
from model_cells import assert_as_close_as_transformers, requests, save_bfloat16, served
from quantized_cells import METHODS, write_quantized

from srv.quantization.layers.int8 import DynamicInt8Linear
from srv_matrix.pytest_plugin import covers
from srv_npu.facts import VARIANTS

pytestmark = pytest.mark.timeout(600)

LENGTHS = (1, 5, 17, 33, 150)
# What the matrix shows as "no": attention in chunks, with soft caps, sinks or position biases, and latent attention of
# other sizes than DeepSeek's.
UNSUPPORTED = (
    *("Gemma2ForCausalLM", "BloomForCausalLM", "MptForCausalLM", "Llama4ForCausalLM", "GptOssForCausalLM"),
    *("MiMoV2FlashForCausalLM", "Glm4MoeLiteForCausalLM", "MiniCPM3ForCausalLM"),
)
CHECKPOINTS = {name: model for name, model in MODELS.items() if name not in UNSUPPORTED}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=covers(f"model:{name}/safetensors", platform="npu")) for name in CHECKPOINTS],
)
def test_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("DeepseekV2ForCausalLM", ["--speculative-algorithm=NGRAM", "--disable-graphs"]),
        ("DeepseekV3ForCausalLM", ["--max-running-requests=3", "--disable-overlap-schedule"]),
        ("Qwen3NextForCausalLM", ["--max-running-requests=3"]),
        ("MistralForCausalLM", ["--speculative-algorithm=NGRAM"]),
        ("Gemma3ForCausalLM", ["--disable-hybrid-swa-memory"]),
        ("Cohere2ForCausalLM", ["--swa-full-tokens-ratio=0.5"]),
    ],
)
def test_prompts_in_chunks_that_end_within_pages(name: str, flags: list[str], tmp_path: Path) -> None:
    """Chunks of 48 tokens and less, of which latent attention absorbs short ones and materialises long ones; drafts;
    and windows in a pool of their own, or in that of all layers."""
    check(name, tmp_path, "--chunked-prefill-size=48", *flags)


def check(name: str, folder: Path, *flags: str) -> None:
    with torch.inference_mode(False):
        model = CHECKPOINTS[name].made()
        save_bfloat16(model, folder)
        with served(folder, "--max-total-tokens=4096", *flags, device="npu") as engine:
            assert engine.context.device.variant in VARIANTS
            assert engine.context.resolved.config.model.dtype == "bfloat16"
            computed = engine.generate(requests(LENGTHS, prompt_logprobs=0))
            cached = engine.generate(requests(LENGTHS))
            assert (engine.stats().replayed_steps > 0) is ("--disable-graphs" not in flags)
        of = CHECKPOINTS[name].of
        assert [result.cached_tokens for result in cached] == [0, 0, 0, 0, 128]
        assert_as_close_as_transformers(computed, model, of=of, lengths=LENGTHS)
        assert_as_close_as_transformers(cached, model, of=of, lengths=LENGTHS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=covers(f"model:{name}/modelslim", platform="npu"))
        for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM")
    ],
)
def test_a_checkpoint_of_modelslim(name: str, tmp_path: Path) -> None:
    """Compared with transformers and the dequantized weights. It is the one method that NPUs have kernels for."""
    lengths = (5, 33)
    with torch.inference_mode(False):
        model = write_quantized(tmp_path, CHECKPOINTS[name].made(), "modelslim")
        with served(tmp_path, "--max-total-tokens=1024", "--disable-graphs", device="npu") as engine:
            assert engine.context.device.variant in VARIANTS
            worker = engine.executor.worker  # type: ignore[attr-defined]
            assert any(isinstance(module, DynamicInt8Linear) for module in worker.loaded.model.modules())
            results = engine.generate(requests(lengths, prompt_logprobs=0))
        assert_as_close_as_transformers(results, model, METHODS["modelslim"].allowed, lengths=lengths)

"""Evidence for the models of the GPU platforms, on the path of a user who sets only the model.

As `tests/core/engine/test_model_cells.py`: log-probabilities are as close to those of transformers in float32 as
transformers itself is in bfloat16. The second time, the longest prompt begins with cached tokens. Steps are not
captured: capturing takes minutes in Triton's interpreter, and the kit's check `engine.graphs` compares captured steps
with others. How to run it: test_gpu_evidence.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bfloat16_models import MODELS
from model_cells import assert_as_close_as_transformers, requests, save_bfloat16, served
from quantized_cells import METHODS, MXFP4, write_quantized

from srv_matrix.pytest_plugin import covers

LENGTHS = (1, 5, 20)
FEW = (1, 9)
QUANTIZED = [
    *(("LlamaForCausalLM", method) for method in ("awq", "w8a8_int8", "fp8")),
    ("Qwen3MoeForCausalLM", "awq"),
    ("DeepseekV3ForCausalLM", "fp8"),
    ("GptOssForCausalLM", MXFP4),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [pytest.param(name, marks=covers(f"model:{name}/safetensors")) for name in MODELS])
def test_a_bfloat16_checkpoint(srv_device: str, name: str, tmp_path: Path) -> None:
    with torch.inference_mode(False):
        model = MODELS[name].made()
        save_bfloat16(model, tmp_path)
        with served(tmp_path, "--max-total-tokens=1024", "--disable-graphs", device=srv_device) as engine:
            assert engine.context.resolved.config.model.dtype == "bfloat16"
            computed = engine.generate(requests(LENGTHS, prompt_logprobs=0))
            cached = engine.generate(requests(LENGTHS))
        assert cached[-1].cached_tokens > 0
        for results in (computed, cached):
            assert_as_close_as_transformers(results, model, of=MODELS[name].of, lengths=LENGTHS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(name, method, marks=covers(f"model:{name}/{method}")) for name, method in QUANTIZED],
)
def test_a_quantized_checkpoint(srv_device: str, name: str, method: str, tmp_path: Path) -> None:
    """Compared with transformers and the dequantized weights."""
    with torch.inference_mode(False):
        model = write_quantized(tmp_path, MODELS[name].made(), method)
        with served(tmp_path, "--max-total-tokens=512", "--disable-graphs", device=srv_device) as engine:
            results = engine.generate(requests(FEW, prompt_logprobs=0))
        allowed = METHODS[method].allowed if method in METHODS else 2.0
        assert_as_close_as_transformers(results, model, allowed, of=MODELS[name].of, lengths=FEW)

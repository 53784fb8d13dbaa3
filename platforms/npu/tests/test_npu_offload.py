"""Weights in host memory on the simulated NPU: the same tokens, and no matrix of such a layer is cast to FRACTAL_NZ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_npu_engine import engine, generate
from transformers import LlamaConfig, LlamaForCausalLM

from srv.executor.in_process import InProcessExecutor
from srv.models.layers.op_layer import op_layers
from srv.testing.engine import LocalEngine
from srv_npu.platform import NpuPlatform

pytestmark = pytest.mark.timeout(900)
PROMPTS = [[7], [9, 4, 11, 40, 3], [12, *range(20, 60)]]


def offloaded(served: LocalEngine) -> list[bool]:
    """Of each layer with a matrix: whether that is in host memory."""
    assert isinstance(served.executor, InProcessExecutor)
    return [layer.offloaded for layer in op_layers(served.executor.worker.model, offloaded=True)]


def test_tokens_are_those_of_weights_on_the_device(platform: NpuPlatform, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    with torch.inference_mode(False):
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = []
    for flags in ((), ("--host-offload-gb", "1")):
        with engine(tmp_path, "npu", "float16", *flags) as served:
            found.append([result.tokens for result in generate(served, PROMPTS)])
            assert offloaded(served).count(True) == (4 * 4 if flags else 0)
    assert found[0] == found[1]

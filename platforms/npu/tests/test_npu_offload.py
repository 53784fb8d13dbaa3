"""Weights in host memory on the simulated NPU: the same tokens, and no matrix of such a layer is cast to FRACTAL_NZ."""

from __future__ import annotations

from pathlib import Path

import modelslim_weights
import pytest
import torch
from test_npu_engine import engine, generate
from transformers import LlamaConfig, LlamaForCausalLM

from srv.executor.in_process import InProcessExecutor
from srv.models.layers.op_layer import OpLayer, op_layers
from srv.testing.engine import LocalEngine
from srv_npu.platform import NpuPlatform

pytestmark = pytest.mark.timeout(900)
PLAIN = ("linear",) * 4  # of attention, and of its MLP
QUANTIZED = ("linear_w8a8", "linear_w8a8", "linear_w8a8_static", "linear")
PROMPTS = [[7], [9, 4, 11, 40, 3], [12, *range(20, 60)]]


def offloaded(served: LocalEngine) -> list[OpLayer]:
    """The layers whose matrices are in host memory."""
    assert isinstance(served.executor, InProcessExecutor)
    return [layer for layer in op_layers(served.executor.worker.loaded.model, offloaded=True) if layer.offloaded]


@pytest.mark.parametrize("quantized", [False, True], ids=["float16", "int8"])
def test_tokens_are_those_of_weights_on_the_device(quantized: bool, platform: NpuPlatform, tmp_path: Path) -> None:
    """Int8 layers, of which some have static activations, are computed by the ops on their weights as loaded."""
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
    with torch.inference_mode(False), torch.no_grad():
        model = LlamaForCausalLM(config)
        if quantized:
            modelslim_weights.quantize(tmp_path, model, modelslim_weights.mixed)
        else:
            model.save_pretrained(tmp_path)
    runs = []
    for flags in ((), ("--host-offload-gb", "1")):
        with engine(tmp_path, "npu", "float16", *flags) as served:
            runs.append([result.tokens for result in generate(served, PROMPTS)])
            moved = tuple(layer.op for layer in offloaded(served))
            assert moved == ((QUANTIZED if quantized else PLAIN) * 4 if flags else ())
    assert runs[0] == runs[1]

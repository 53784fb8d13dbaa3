"""What the support matrix shows as verified of GGUF files as llama.cpp's converter writes them.

As `test_model_cells.py` and its neighbours do of the first architectures: log-probabilities, and the embeddings of
encoders, are about as close to those of transformers in float32, with the dequantized weights, as transformers itself
is in bfloat16. `tests/core/models/families/test_gguf_files.py` compares the same models in float32.
"""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_cases import CASES, SIZES, expected, write_gguf
from model_cells import assert_as_close_as_transformers, requests, rounded, served
from pooled_cells import assert_as_close_as_transformers as assert_close
from pooled_engine import pooled, vector
from torch import Tensor
from torch.nn.functional import normalize

from srv.testing.pooled import pooled_reference
from srv.types import Pooling
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = [
    pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load"),
    pytest.mark.proof(minutes=0.05),
]
LENGTHS, VOCAB_SIZE = (5, 20, 40), SIZES["vocab_size"]
ALLOWED = 6.0  # native kernels round the inputs of blocks to 8 bits as well
DECODERS = {
    "bamba": "BambaForCausalLM",
    "bloom": "BloomForCausalLM",
    "chatglm": "GlmForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "deepseek3": "DeepseekV3ForCausalLM",
    "deepseek32": "DeepseekV32ForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "mpt": "MptForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi2": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
ENCODERS = {
    "bert": "BertModel",
    "jina-bert-v3": "JinaEmbeddingsV3Model",
    "modern-bert": "ModernBertModel",
    "nomic-bert": "NomicBertModel",
}


def written(name: str, folder: Path) -> tuple[Any, Path]:
    """The model of transformers with the values of the file, in float32."""
    model, path = rounded(CASES[name].made()), folder / "model.gguf"
    model.save_pretrained(folder)
    write_gguf(name, folder, path, Kind.Q8_0)
    same = type(model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return same.eval(), path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=covers(f"model:{cell}/gguf", platform="cpu")) for name, cell in DECODERS.items()]
)
def test_a_gguf_file_of_blocks(name: str, tmp_path: Path) -> None:
    """The second time, prompts begin with cached pages."""
    model, path = written(name, tmp_path)
    with served(path, "--max-total-tokens=1024") as engine:
        assert engine.context.model is not None
        assert engine.context.model.architecture == DECODERS[name]
        assert not engine.context.resolved.config.weights.dequantize_weights
        computed = engine.generate(requests(LENGTHS, VOCAB_SIZE, prompt_logprobs=0))
        cached = engine.generate(requests(LENGTHS, VOCAB_SIZE))
    assert cached[-1].cached_tokens >= 16
    for results in (computed, cached):
        assert_as_close_as_transformers(results, model, ALLOWED, statistics.fmean, LENGTHS, VOCAB_SIZE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=covers(f"model:{cell}/gguf", platform="cpu")) for name, cell in ENCODERS.items()]
)
def test_a_gguf_file_of_an_encoder(name: str, tmp_path: Path) -> None:
    model, path = written(name, tmp_path)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, VOCAB_SIZE, (length,), generator=draw).tolist() for length in (3, 17, 1, 40)]
    with served(path) as engine:
        assert engine.context.model is not None
        assert engine.context.model.architecture == ENCODERS[name]
        pooling = Pooling(engine.context.resolved.config.model.pooling)
        specs = [pooled(str(number), each, pooling) for number, each in enumerate(prompts)]
        alone = torch.stack([vector(engine.generate([each])[0]) for each in specs])
        together = torch.stack([vector(each) for each in engine.generate(specs)])

    def embeddings(model: Any) -> Tensor:
        states = [expected(model, torch.tensor(each)).float() for each in prompts]
        return torch.stack([normalize(pooled_reference(each, pooling), dim=0) for each in states])

    coarse = embeddings(copy.deepcopy(model).to(torch.bfloat16))
    assert_close(torch.stack((alone, together)), embeddings(model), coarse, ALLOWED)

"""What the support matrix shows as verified of pooled models, on the path of a user who sets nothing but the model.

As `test_model_cells.py`: checkpoints in bfloat16, with heads of 64. What is returned, an embedding or the logits of
labels, must be as close to that of transformers in float32 as transformers itself is in bfloat16. Exact comparisons in
float32 are in `test_encoders.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_cells import assert_fast_path, rounded, save_bfloat16, served
from pooled_models import POSITIONS, pooled_model
from torch import Tensor
from torch.nn.functional import normalize

from srv.models.layers.linear import Linear
from srv.testing.engine import GenerationResult
from srv.testing.pooled import pooled_reference
from srv.types import FinishReason, PooledOutput, Pooling, PoolingParams, RequestSpec
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")

HEADS = {"hidden_size": 128, "num_attention_heads": 2, "initializer_range": 0.1}
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
# Longer than the local windows; the longest has as many tokens as the encoders have positions.
PROMPTS = [[5, 6, 7], list(range(3, 43)), [9], [(index * 37) % 90 + 5 for index in range(POSITIONS)]]
CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "modernbert": "ModernBert",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
KINDS = {
    "": "Model",
    "alone": "Model",
    "masked": "ForMaskedLM",
    "classifier": "ForSequenceClassification",
    "scorer": "ForSequenceClassification",
}
EMBEDDING = (
    *(f"{family}{kind}" for family in ("bert", "roberta", "xlm-roberta", "modernbert") for kind in ("", " masked")),
    *(f"{family} alone" for family in DECODERS),
)
LABELLING = (
    "bert classifier",
    "roberta classifier",
    "xlm-roberta scorer",
    "modernbert classifier",
    *(f"{family} classifier" for family in DECODERS),
)
FAST = ("modernbert", "qwen3 classifier")


def marked(name: str) -> Any:
    family, _, kind = name.partition(" ")
    cell = covers(f"model:{CLASSES[family]}{KINDS[kind]}/safetensors", platform="cpu")
    return pytest.param(name, marks=[cell, *(() if name in FAST else (pytest.mark.slow,))])


def results_of(name: str, folder: Path, output: PooledOutput) -> tuple[Any, Tensor]:
    """The model in float32, and what an engine returns [2, prompts, N]: each prompt alone, and in a batch.

    Encoders attend with torch's operator, since the native kernel does not support attention to later tokens.
    """
    decoder = name.split()[0] in DECODERS
    model = rounded(pooled_model(name, folder, **HEADS, **({"head_dim": 64} if decoder else {})))
    save_bfloat16(model, folder)
    with served(folder, *(["--max-total-tokens=512"] if decoder else [])) as engine:
        config = engine.context.resolved.config.model
        assert config.dtype == "bfloat16"
        if decoder:
            assert_fast_path(engine)
        modules = engine.executor.worker.model.modules()  # type: ignore[attr-defined]
        assert {each.implementation for each in modules if isinstance(each, Linear)} == {"native"}
        params = PoolingParams(pooling=Pooling(config.pooling), output=output)
        specs = [RequestSpec(id=str(number), tokens=tuple(each), params=params) for number, each in enumerate(PROMPTS)]
        alone = torch.stack([vector(engine.generate([each])[0]) for each in specs])
        together = torch.stack([vector(each) for each in engine.generate(specs)])
    return model, torch.stack((alone, together))


def vector(result: GenerationResult) -> Tensor:
    assert (result.finish, result.error) == (FinishReason.STOP, None)
    return torch.from_numpy(np.frombuffer(result.vectors, dtype="<f4").copy())


def assert_as_close_as_transformers(ours: Tensor, exact: Tensor, coarse: Tensor) -> None:
    """exact, coarse [prompts, N]: in float32 and in bfloat16."""
    assert ours.shape == (2, *exact.shape)
    theirs = (coarse - exact).abs().max()
    assert theirs < 0.2 * exact.std(), "errors as large as the results: nothing could be told apart"
    assert (ours - exact).abs().max() <= 2 * theirs


@pytest.mark.parametrize("name", [marked(name) for name in EMBEDDING])
def test_embeddings_of_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    pooling = Pooling.LAST if name.endswith("alone") else Pooling.MEAN  # the defaults
    model, ours = results_of(name, tmp_path, PooledOutput.EMBEDDING)
    assert_as_close_as_transformers(
        ours, embeddings(model, pooling), embeddings(copy.deepcopy(model).to(torch.bfloat16), pooling)
    )


def embeddings(model: Any, pooling: Pooling) -> Tensor:
    """[prompts, hidden], of length 1."""
    encoder = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        states = [encoder(input_ids=torch.tensor([each])).last_hidden_state[0].float() for each in PROMPTS]
    return torch.stack([normalize(pooled_reference(each, pooling), dim=0) for each in states])


@pytest.mark.parametrize("name", [marked(name) for name in LABELLING])
def test_labels_of_a_bfloat16_checkpoint(name: str, tmp_path: Path) -> None:
    model, ours = results_of(name, tmp_path, PooledOutput.LABELS)
    assert_as_close_as_transformers(ours, labels(model), labels(copy.deepcopy(model).to(torch.bfloat16)))


def labels(model: Any) -> Tensor:
    """[prompts, labels]."""
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([each])).logits[0].float() for each in PROMPTS])

"""Pooled models as bfloat16 checkpoints with heads of 64, on the path of a user who sets nothing but the model.

What is returned, an embedding or the logits of labels, must be as close to that of transformers in float32 as
transformers itself is in bfloat16.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from model_cells import rounded, save_bfloat16, served
from pooled_engine import PROMPTS, pooled, states_of, vector
from pooled_models import pooled_model
from torch import Tensor
from torch.nn.functional import normalize

from srv.testing.engine import CheckedEngine
from srv.testing.pooled import pooled_reference
from srv.types import PooledOutput, Pooling

_TOKENS = [token for prompt in PROMPTS for token in prompt]
_DRAW = random.Random(1)
# One label of a few prompts is too small a sample of errors: by chance, a second one is twice as large.
MORE_PROMPTS = (*PROMPTS, *(_DRAW.choices(_TOKENS, k=3 + number) for number in range(12)))
HEADS = {"hidden_size": 128, "num_attention_heads": 2, "initializer_range": 0.1}
# Of encoders whose configuration has other fields.
HEADS_OF: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 128, "n_heads": 2, "initializer_range": 0.1},
    "eurobert": {**HEADS, "head_dim": 64},
    "gemma3": {**HEADS, "head_dim": 64, "query_pre_attn_scalar": 64},
    "nomic": {**HEADS, "head_dim": 64},
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "gte", "nomic", "jina", "distilbert", "eurobert", "mpnet")
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "modernbert": "ModernBert",
    "gte": "Gte",
    "nomic": "NomicBert",
    "jina": "JinaEmbeddingsV3",
    "distilbert": "DistilBert",
    "eurobert": "EuroBert",
    "mpnet": "MPNet",
    "gemma3": "Gemma3Text",
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
    *(f"{family}{kind}" for family in ENCODERS for kind in ("", " masked")),
    "gemma3 alone",
    *(f"{family} alone" for family in DECODERS),
)
LABELLING = (
    "bert classifier",
    "roberta classifier",
    "xlm-roberta scorer",
    "modernbert classifier",
    "gte classifier",
    "nomic classifier",
    "jina scorer",
    "distilbert classifier",
    "mpnet classifier",
    "gemma3 classifier",
    *(f"{family} classifier" for family in DECODERS),
)


def cell(name: str) -> str:
    """The cell of the support matrix that a model is evidence for."""
    family, _, kind = name.partition(" ")
    return f"model:{CLASSES[family]}{KINDS[kind]}/safetensors"


def is_decoder(name: str) -> bool:
    return name.split()[0] in DECODERS


@contextmanager
def pooled_engine(name: str, folder: Path, *arguments: str, device: str = "cpu") -> Iterator[tuple[Any, CheckedEngine]]:
    """The model of transformers in float32, and an engine of its bfloat16 checkpoint."""
    decoder = is_decoder(name)
    heads = {**HEADS, "head_dim": 64} if decoder else HEADS_OF.get(name.split()[0], HEADS)
    model = rounded(pooled_model(name, folder, **heads))
    save_bfloat16(model, folder)
    pool = ["--max-total-tokens=512"] if decoder else []
    with served(folder, *pool, *arguments, device=device) as engine:
        assert engine.context.resolved.config.model.dtype == "bfloat16"
        yield model, engine


def check(name: str, model: Any, engine: CheckedEngine) -> None:
    """What the engine returns of each prompt alone and of all in a batch is as close as transformers in bfloat16."""
    pooling = Pooling(engine.context.resolved.config.model.pooling)
    labelled = name in LABELLING
    expected: Callable[[Any], Tensor] = labels if labelled else lambda prompt: embeddings(prompt, pooling)
    output = PooledOutput.LABELS if labelled else PooledOutput.EMBEDDING
    prompts = MORE_PROMPTS if labelled else PROMPTS
    specs = [pooled(str(number), prompt, pooling, output=output) for number, prompt in enumerate(prompts)]
    alone = torch.stack([vector(engine.generate([spec])[0]) for spec in specs])
    together = torch.stack([vector(result) for result in engine.generate(specs)])
    assert_as_close_as_transformers(
        torch.stack((alone, together)), expected(model), expected(copy.deepcopy(model).to(torch.bfloat16))
    )


def assert_as_close_as_transformers(ours: Tensor, exact: Tensor, coarse: Tensor, allowed: float = 2.0) -> None:
    """ours [2, prompts, N]; exact, coarse [prompts, N]: in float32 and in bfloat16. allowed: our error as a multiple
    of that of transformers in bfloat16."""
    assert ours.shape == (2, *exact.shape)
    theirs = (coarse - exact).square().mean().sqrt()
    assert theirs < 0.2 * exact.std(), "errors as large as the results: nothing could be told apart"
    assert (ours - exact).square().mean().sqrt() <= allowed * theirs


def embeddings(model: Any, pooling: Pooling) -> Tensor:
    """[prompts, hidden], of length 1."""
    states = [states_of(model, prompt).float() for prompt in PROMPTS]
    return torch.stack([normalize(pooled_reference(state, pooling), dim=0) for state in states])


def labels(model: Any) -> Tensor:
    """[prompts, labels]."""
    with torch.no_grad():
        return torch.stack(
            [model(input_ids=torch.tensor([more_prompt])).logits[0].float() for more_prompt in MORE_PROMPTS]
        )

"""Engines with small encoders and classifiers, and what a test compares of them with transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pooled_models import POSITIONS
from torch import Tensor

from srv.testing.engine import GenerationResult, LocalEngine
from srv.types import FinishReason, Pooling, PoolingParams, RequestSpec

# Longer than the local windows; the longest has as many tokens as the model has positions.
PROMPTS = [[5, 6, 7], list(range(3, 43)), [9], [(index * 37) % 90 + 5 for index in range(POSITIONS)]]


def engine(folder: Path, *more: str) -> LocalEngine:
    common = ("--device", "cpu", "--dtype", "float32", "--max-running-requests", "6")
    return LocalEngine.launch([*common, "--model-path", str(folder), *more])


def pooled(name: str, tokens: Sequence[int], pooling: Pooling, **params: Any) -> RequestSpec:
    return RequestSpec(id=name, tokens=tuple(tokens), params=PoolingParams(pooling=pooling, **params))


def vector(result: GenerationResult) -> Tensor:
    assert (result.finish, result.error) == (FinishReason.STOP, None)
    return torch.from_numpy(np.frombuffer(result.vectors, dtype="<f4").copy())


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=3e-5, rtol=2e-4)


def states_of(model: Any, tokens: Sequence[int]) -> Tensor:
    encoder = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        states: Tensor = encoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return states

"""What a rank computes from pooled hidden states: embeddings after dense layers, and the logits of labels or tokens.

Owns the dense layers of a checkpoint, whose weights are in folders of their own. Must not know requests, except for
their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from srv.errors import ModelError
from srv.models.base import CausalLM
from srv.models.checkpoints.filling import OTHER_CHECKPOINT
from srv.models.config.sentence import DENSE_WEIGHTS
from srv.sample.pooling import Finish, finished_embeddings
from srv.specs import ModelFacts
from srv.types import DenseLayer, PooledOutput, PoolingParams


class DenseLayers:
    """The dense layers between pooling and the embedding, computed in float32. Raises ModelError like `_load`.

    `batch_invariant`: each row is multiplied alone, because torch chooses an order of summation by the number of rows.
    """

    def __init__(self, facts: ModelFacts, device: torch.device, batch_invariant: bool = False) -> None:
        self._layers = [(each, *_load(Path(facts.path), each, device)) for each in facts.head.dense]
        self._batch_invariant = batch_invariant
        self.bytes = sum(each.nbytes for layer in self._layers for each in layer[1:] if each is not None)

    def embeddings(self, pooled: Tensor, params: Sequence[PoolingParams]) -> list[Tensor]:
        """float32 [n, hidden] -> n times float32 [dimensions]."""
        for layer, weight, bias in self._layers:
            parts = pooled.chunk(len(pooled) if self._batch_invariant else 1)
            pooled = _activated(layer.activation, torch.cat([F.linear(part, weight, bias) for part in parts]))
        return finished_embeddings(pooled, params)


def finishes(model: CausalLM, dense: DenseLayers, dtype: torch.dtype) -> Mapping[PooledOutput, Finish]:
    """What to do with pooled hidden states, for each output of requests. `dtype`: of the model's activations."""

    def labels(pooled: Tensor, params: Sequence[PoolingParams]) -> Sequence[Tensor]:
        return model.classify(pooled.to(dtype)).unbind()

    def tokens(pooled: Tensor, params: Sequence[PoolingParams]) -> Sequence[Tensor]:
        logits = model.logits(pooled.to(dtype))
        return [torch.stack([row[token] for token in each.tokens]) for row, each in zip(logits, params, strict=True)]

    return {
        PooledOutput.EMBEDDING: dense.embeddings,
        PooledOutput.LABELS: labels,
        PooledOutput.TOKENS: tokens,
    }


def _load(path: Path, layer: DenseLayer, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out] in float32. Raises ModelError: no_weights, damaged, shape_mismatch."""
    file = path / layer.folder / DENSE_WEIGHTS
    if not file.is_file():
        reason = f"its dense layer {layer.folder} has no {DENSE_WEIGHTS}"
        remedy = "Save the model with a current version of sentence-transformers, which writes safetensors"
        raise ModelError("no_weights", str(path), reason, remedy)
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            "damaged", str(file), f"its weights cannot be read ({error})", "Fetch the file again"
        ) from error
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (layer.outputs, layer.inputs)}
    if layer.bias:
        expected["linear.bias"] = (layer.outputs,)
    found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if found != expected:
        raise ModelError("shape_mismatch", str(file), f"it has {found}, expected {expected}", OTHER_CHECKPOINT)
    weight, bias = stored["linear.weight"], stored.get("linear.bias")
    return weight.float().to(device), None if bias is None else bias.float().to(device)


def _activated(name: str, x: Tensor) -> Tensor:
    match name:
        case "identity":
            return x
        case "tanh":
            return x.tanh()
        case "gelu":
            return F.gelu(x)
        case "relu":
            return x.relu()
        case _:
            return x.sigmoid()

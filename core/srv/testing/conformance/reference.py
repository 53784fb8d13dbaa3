"""The reference for an engine's output: the same model on the host in float32, with dense (non-paged) attention.

Rounding may decide between two tokens with nearly equal logits, so a token is accepted unless the reference has one
whose logit is higher by more than the dtype's tolerance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.build import build
from srv.models.choice import LayerOptions
from srv.models.layers.context import BuildContext
from srv.models.read import read_facts
from srv.models.transformers.hf_check import DenseCache
from srv.platform.interface import OpImpl
from srv.platform.ops import Ops
from srv.testing.conformance.model import Fault
from srv.testing.conformance.ops import contracts
from srv.types import SamplingParams

# Tolerances of a logit or log-probability; the logits have a standard deviation of about 3.
LOGIT_TOLERANCE = {"float32": 0.01, "bfloat16": 0.35, "float16": 0.06}
# The largest distance of an embedding of length 1 from the reference's.
EMBEDDING_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}

AdjustLogits = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]  # logits, prompt, output so far -> logits


class Reference:
    """The model in a folder, on the host."""

    def __init__(self, folder: Path) -> None:
        by_op = contracts()
        impls = [OpImpl(op, "reference", lambda args: None, by_op[op].reference) for op in by_op]
        self._model = build(
            read_facts(folder),
            LayerOptions(model_impl="srv"),
            BuildContext(torch.device("cpu"), torch.float32, Ops("the reference", impls)),
        )

    def parameters(self, ranks: int) -> int:
        """The parameters that one of several ranks holds: an equal share of every matrix, and whole vectors."""
        return sum(parameter.numel() // (ranks if parameter.dim() > 1 else 1) for parameter in self._model.parameters())

    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """float32 [tokens, hidden]: the hidden states after the last norm."""
        cache = DenseCache()
        cache.rows = (("one", 0, len(tokens)),)
        with torch.inference_mode():
            inputs = ModelInputs(torch.tensor(tokens), torch.arange(len(tokens)))
            hidden: Tensor = self._model(inputs, ForwardContext(cache.attend))
            return hidden

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [tokens, vocab]: the logits after each token."""
        with torch.inference_mode():
            return self._model.logits(self.hidden_states(tokens)).float()

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """The same as log-probabilities (natural logarithm)."""
        return self.logits(tokens).log_softmax(-1)

    def check_greedy(
        self, prompt: Sequence[int], output: Sequence[int], dtype: str, what: str, adjust: AdjustLogits | None = None
    ) -> None:
        """Fault unless each output token has the largest logit, within the tolerance, after `adjust`."""
        logits = self.logits([*prompt, *output])
        for index, token in enumerate(output):
            row = logits[len(prompt) + index - 1]
            if adjust is not None:
                row = adjust(row.clone(), prompt, output[:index])
            deficit = float(row.max() - row[token])
            if deficit > LOGIT_TOLERANCE[dtype]:
                best = int(row.argmax())
                raise Fault(
                    f"{what}, in {dtype}: after {len(prompt)} prompt and {index} output tokens came token {token}, "
                    f"but the logit of token {best} is higher by {deficit:.3g} (tolerance {LOGIT_TOLERANCE[dtype]})"
                )


def penalties(params: SamplingParams, end_tokens: Sequence[int]) -> AdjustLogits:
    """Penalties, logit bias, masks and min_tokens, written from their definitions."""

    def adjust(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        counts = Counter(output)
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in counts.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, amount in params.logit_bias:
            logits[token] += amount
        if params.allowed_token_ids:
            allowed = list(params.allowed_token_ids)
            logits = logits.new_full(logits.shape, float("-inf")).index_copy_(0, torch.tensor(allowed), logits[allowed])
        for *before, last in params.banned:
            if list(output[len(output) - len(before) :]) == before:
                logits[last] = float("-inf")
        if len(output) < params.min_tokens:
            for token in {*end_tokens, *params.stop_token_ids}:
                logits[token] = float("-inf")
        return logits

    return adjust

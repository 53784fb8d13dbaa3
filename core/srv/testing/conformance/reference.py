"""What an engine's output is held against: the same model on the host in float32, attention without pages.

Rounding may tip a choice between two tokens that are nearly equal, so a token is right if the reference finds none
that is better by more than the dtype explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from srv.models.base import ForwardContext, ModelInputs
from srv.models.build import build
from srv.models.read import read_facts
from srv.models.transformers.hf_check import DenseCache
from srv.platform.interface import OpImpl
from srv.platform.ops import Ops
from srv.testing.conformance.model import Fault
from srv.testing.conformance.ops import contracts
from srv.types import SamplingParams

# By how much a logit (or the logarithm of a probability) may differ, on logits of a spread of about 3.
SLACK = {"float32": 0.01, "bfloat16": 0.35, "float16": 0.06}

Change = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]  # logits, prompt, output so far -> logits


class Reference:
    """The model of a folder, on the host."""

    def __init__(self, folder: Path) -> None:
        known = contracts()
        impls = [OpImpl(op, "reference", lambda args: None, known[op].reference) for op in known]
        self._model = build(
            read_facts(folder),
            ops=Ops("the reference", impls),
            device=torch.device("cpu"),
            dtype=torch.float32,
            model_impl="srv",
            load_format="auto",
        )

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [tokens, vocab]: what follows each token."""
        cache = DenseCache()
        cache.rows = (("one", 0, len(tokens)),)
        with torch.inference_mode():
            inputs = ModelInputs(torch.tensor(tokens), torch.arange(len(tokens)))
            hidden = self._model(inputs, ForwardContext(cache.attend))
            return self._model.logits(hidden).float()

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Their logarithmic probabilities, natural."""
        return self.logits(tokens).log_softmax(-1)

    def check_greedy(
        self, prompt: Sequence[int], output: Sequence[int], dtype: str, what: str, change: Change | None = None
    ) -> None:
        """Fault unless each output token is the best one, or as good as. `change` is done to the logits first."""
        logits = self.logits([*prompt, *output])
        for index, token in enumerate(output):
            row = logits[len(prompt) + index - 1]
            if change is not None:
                row = change(row.clone(), prompt, output[:index])
            short = float(row.max() - row[token])
            if short > SLACK[dtype]:
                best = int(row.argmax())
                raise Fault(
                    f"{what}, in {dtype}: after {len(prompt)} prompt and {index} output tokens it gave token {token}, "
                    f"but token {best} is better by {short:.3g} ({SLACK[dtype]} is what rounding explains)"
                )


def penalties(params: SamplingParams, end_tokens: Sequence[int]) -> Change:
    """What these parameters do to logits, written from their definitions."""

    def change(logits: Tensor, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        counts = Counter(output)
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in counts.items():
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        for token, amount in params.logit_bias:
            logits[token] += amount
        if len(output) < params.min_tokens:
            for token in {*end_tokens, *params.stop_token_ids}:
                logits[token] = float("-inf")
        return logits

    return change

"""Which steps replay pieces, and what attention gets. The pieces are those of a simulated capture of host operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from host_transfers import HOST_TRANSFERS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from srv.args.rules.pieces import captured_tokens
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.platform.interface import AttentionLayer
from srv.worker.batch import Inputs
from srv.worker.pieces import PiecewiseSteps

LAYERS = (AttentionLayer(0, 2, 1, 3, 1.0), AttentionLayer(1, 2, 1, 3, 1.0))


class Recorded(TorchDispatchMode):
    """Runs operators, and runs them again on the same tensors. At most one is recorded at a time."""

    active = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        assert Recorded.active == 0
        for function, args, kwargs, result in self.calls:
            again = function(*args, **kwargs)
            if again is not result and not result._is_view():
                result.copy_(again)


@contextmanager
def piece() -> Iterator[Callable[[], None]]:
    assert Recorded.active == 0
    recorded = Recorded()
    Recorded.active += 1
    try:
        with recorded:
            yield recorded.replay
    finally:
        Recorded.active -= 1


class Model(CausalLM):
    """Two layers; the residual is computed in one piece and read in the next one."""

    attention_layers = LAYERS

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        x = torch.stack([inputs.tokens, inputs.positions], dim=-1).float()
        for layer in LAYERS:
            q = (x.sum(-1)[:, None, None] + torch.zeros(2, 3)).contiguous()
            x = x + context.attend(layer, q, q[:, :1] + 1, q[:, :1] * 2).mean(-1)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Attention:
    """Its result depends on all tokens of the step."""

    def __init__(self) -> None:
        self.calls: list[tuple[AttentionLayer, int]] = []

    def __call__(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert Recorded.active == 0
        self.calls.append((layer, len(q)))
        return q + k.sum(0) + v.cumsum(0)


@pytest.fixture
def steps() -> PiecewiseSteps:
    made = PiecewiseSteps(Model(), (), piece, (2, 5), HOST_TRANSFERS, padding=True)
    made.capture()
    return made


def test_a_replay_is_the_forward_pass_of_the_true_tokens(steps: PiecewiseSteps) -> None:
    assert steps.pieces == 2 * 3
    with torch.inference_mode():
        for tokens in (5, 3, 1, 4, 2):
            inputs = ModelInputs(torch.arange(tokens) + 7 * tokens, torch.arange(tokens))
            attention = Attention()
            found = steps.replay(inputs, attention)
            assert attention.calls == [(layer, tokens) for layer in LAYERS]
            assert torch.equal(found, Model()(inputs, ForwardContext(Attention())))


def test_which_steps_are_replayed(steps: PiecewiseSteps) -> None:
    def covered(made: PiecewiseSteps) -> list[int]:
        tokens = (torch.zeros(number, dtype=torch.int64) for number in range(1, 7))
        inputs = (Inputs(ModelInputs(each, each), [len(each)], [len(each)], None, [], [], {}) for each in tokens)
        return [each.model.tokens.numel() for each in inputs if made.covers(each)]

    assert covered(steps) == [1, 2, 3, 4, 5]
    assert covered(PiecewiseSteps(Model(), (), piece, (2, 5), HOST_TRANSFERS, padding=False)) == [2, 5]


def test_layers_share_buffers(steps: PiecewiseSteps) -> None:
    """tokens, positions: 8 bytes; q, out: 24, k, v: 12, hidden: 8; for five tokens."""
    assert steps.buffers.nbytes() == 5 * (2 * 8 + 2 * 24 + 2 * 12 + 8)


def test_a_failed_forward_pass_ends_its_piece() -> None:
    class Failing(Model):
        def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
            x = super().forward(inputs, context)
            if Recorded.active:
                raise RuntimeError("not capturable")
            return x

    with pytest.raises(RuntimeError, match="not capturable"):
        PiecewiseSteps(Failing(), (), piece, (2,), HOST_TRANSFERS, padding=True).capture()
    assert Recorded.active == 0


def test_default_counts_grow() -> None:
    assert captured_tokens(None, 4096, 100) == (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert captured_tokens(None, 64, 8192)[-2:] == (56, 64)
    assert captured_tokens(None, 4096, 8192)[-5:] == (2048, 2560, 3072, 3584, 4096)
    assert (len(captured_tokens(None, 4096, 8192)), captured_tokens(None, 5, 3)) == (32, (3,))
    assert captured_tokens("[7, 2, 7]", 4096, 1) == (2, 7)

"""Compiled steps: which steps they are, and that none is compiled after the start. With torch's real compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from host_transfers import HOST_TRANSFERS
from torch import Tensor

from srv.errors import ModelError
from srv.models.base import CausalLM, ForwardContext, ModelInputs
from srv.models.layers.linear import Projection
from srv.platform.interface import AttentionBatch
from srv.sample.pooling import VectorRow
from srv.specs import AttentionLayer
from srv.worker.batch import Inputs
from srv.worker.compiled import CompiledSteps, OpaqueCalls
from srv.worker.ways import ForwardStep

ROWS = 4


class Model(CausalLM):
    """Its logits are the token and the position of each row, plus what attention adds to them."""

    attention_layers = (AttentionLayer(0, 1, 1, 1, 1.0),)

    def forward(self, inputs: ModelInputs, context: ForwardContext) -> Tensor:
        both = torch.stack([inputs.tokens, inputs.positions], dim=-1).float().unsqueeze(1)
        return context.attend(self.attention_layers[0], both, both, both).squeeze(1) * 2

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden + 1


class Branching(Model):
    """It reads a number of its input, which cannot be traced as one graph."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden if float(hidden.sum()) > 0 else -hidden


class Adding:
    """Attention that adds a number to the values: the page of the first row and a half."""

    def plan(self, batch: AttentionBatch) -> float:
        return int(batch.page_table[0, 0]) + 0.5

    def forward(self, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, metadata: float) -> Tensor:
        return v + metadata


def run(made: CompiledSteps, given: Inputs, page: int) -> list[list[float]]:
    """The logits of a step whose rows have one page."""
    logits = made.run(ForwardStep((), given, (torch.full((len(given.query_lens), 1), page, dtype=torch.int32),))).logits
    assert logits is not None
    return logits.tolist()


def expected(inputs: ModelInputs, number: float) -> list[list[float]]:
    pairs = zip(inputs.tokens.tolist(), inputs.positions.tolist(), strict=True)
    return [[(value + number) * 2 + 1 for value in pair] for pair in pairs]


def inputs(rows: int, tokens: int | None = None, **fields: Any) -> Inputs:
    count = rows if tokens is None else tokens
    model = ModelInputs(torch.arange(10, 10 + count), torch.arange(20, 20 + count))
    empty: dict[str, Any] = {"outputs": None, "sampled": [], "scores": [], "vectors": {}}
    return Inputs(model=model, query_lens=[1] * rows, kv_lens=[21] * rows, **{**empty, **fields})


@pytest.mark.parametrize(
    ("given", "compiled"),
    [
        (inputs(1), True),
        (inputs(ROWS), True),
        (inputs(ROWS + 1), False),
        (inputs(2, tokens=3), False),
        (inputs(2, tokens=3, drafts_only=True), True),
        (inputs(2, scores=[(0, np.zeros(1, dtype=np.int64))]), False),
        (inputs(2, vectors={0: VectorRow(0, 0, 1, 21)}), False),
    ],
    ids=["1", "the most", "more", "a prompt among them", "drafts", "scored", "hidden states returned"],
)
def test_which_steps_are_compiled(given: Inputs, compiled: bool) -> None:
    assert CompiledSteps(Model(), [Adding()], ROWS, HOST_TRANSFERS).covers(given) is compiled


class Product(Projection):
    """A layer [T, 3] -> [T, 5] of bfloat16, whose kernel returns this dtype."""

    def __init__(self, float32_results: bool, returns: torch.dtype) -> None:
        super().__init__(torch.bfloat16, {"product": 5}, 3)
        self.float32_results = float32_results
        self.kernel = lambda x: torch.ones(len(x), 5, dtype=returns)

    def weight_views(self) -> dict[str, Tensor]:
        return {}


def test_the_compiler_knows_the_dtypes_of_results() -> None:
    """Kernels of output layers and routers return float32, or the model's dtype if they cannot."""
    wide, narrow = torch.float32, torch.bfloat16
    layers = [Product(True, wide), Product(True, narrow), Product(False, narrow)]
    calls, given = OpaqueCalls((), layers), torch.ones(2, 3, dtype=narrow)
    promised = [calls.kernel_result(given, number) for number in range(3)]
    returned = [calls.run_kernel(given, number) for number in range(3)]
    assert [each.dtype for each in promised] == [each.dtype for each in returned] == [wide, wide, narrow]
    assert {each.shape for each in (*promised, *returned)} == {(2, 5)}


@pytest.mark.slow
def test_no_step_is_compiled_after_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """Two graphs serve every row count, each with the attention of its own step. Two models do not mix."""
    steps, others = (CompiledSteps(Model(), [Adding()], ROWS, HOST_TRANSFERS) for _ in range(2))
    for each in (steps, others):
        each.compile()
    with torch.inference_mode():
        for rows in (3, 1, 2, 4, 1):
            given = inputs(rows)
            for each, page in ((steps, rows), (others, rows + 10)):
                assert run(each, given, page) == expected(given.model, page + 0.5)
        assert (steps.graphs, others.graphs, "runs uncompiled" in caplog.text) == (2, 2, False)
        torch.compiler.reset()  # whoever does this in the process
        assert run(steps, given, 1) == expected(given.model, 1.5)
    assert steps.graphs == 2
    assert steps.ran_uncompiled
    assert "runs uncompiled" in caplog.text


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    pattern = r"^model Branching: torch.compile cannot compile it: .* Start without --enable-torch-compile"
    with pytest.raises(ModelError, match=pattern):
        CompiledSteps(Branching(), [Adding()], ROWS, HOST_TRANSFERS).compile()

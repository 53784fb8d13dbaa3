"""What the support matrix shows as verified of models in quantized checkpoints, for a user who sets only the model.

As `test_model_cells.py`: log-probabilities are about as close to those of transformers in float32, with the dequantized
weights, as transformers itself is in bfloat16. The weights have the bytes that a plan predicts. One method stands for
those with the same layers; a few architectures have all methods. With the slow tests, each architecture runs in one
method and each method with each kind of layer; the proof runs the others.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bfloat16_models import MODELS
from model_cells import assert_as_close_as_transformers, requests, served
from quantized_cells import METHODS, MXFP4, write_quantized

from srv.models.layers.experts import ExpertWeights
from srv.planning.ledger import WEIGHTS
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")

LENGTHS = (5, 20)
DIFFERENT = ("awq", "w8a8_int8", "fp8", "bitsandbytes")  # in their layers and ops
COMPLETE = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
# What the matrix shows as "no": int8 experts with biases, and inputs as rows.
REFUSED = {"GptOssForCausalLM": ("w8a8_int8",), "GPT2LMHeadModel": DIFFERENT[1:]}
CELLS = [
    *(
        (name, method)
        for name in MODELS
        for method in (METHODS if name in COMPLETE else DIFFERENT)
        if method not in REFUSED.get(name, ())
    ),
    ("GptOssForCausalLM", MXFP4),
    *((name, "modelslim") for name in ("Starcoder2ForCausalLM", "Lfm2MoeForCausalLM")),  # whose files have other names
]
# Rounding changes which experts a few tokens use where embeddings do not decide that.
AVERAGED = (
    *(("Lfm2MoeForCausalLM", method) for method in ("w8a8_int8", "modelslim")),
    ("GptOssForCausalLM", "fp8"),
)
FAST = (("LlamaForCausalLM", "awq"), ("Qwen3MoeForCausalLM", "fp8"))


def broad() -> set[tuple[str, str]]:
    """The cells that run with the slow tests."""
    methods = {name: [method for method in DIFFERENT if (name, method) in CELLS] for name in MODELS}
    one_each = {(name, found[place % len(found)]) for place, (name, found) in enumerate(methods.items()) if found}
    kinds = {(name, method) for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM") for method in METHODS}
    return one_each | kinds | {("GptOssForCausalLM", MXFP4)}


def tier(cell: tuple[str, str]) -> list[pytest.MarkDecorator]:
    if cell in FAST:
        return []
    return [pytest.mark.slow if cell in broad() else pytest.mark.proof(minutes=0.05)]


@pytest.fixture(autouse=True, scope="module")
def few_collected_objects() -> Iterator[None]:
    """Capturing steps collects garbage, which takes a second with all modules of transformers."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def made(name: str) -> Any:
    return MODELS[name].made()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(
            name,
            method,
            marks=[covers(f"model:{name}/{method}", platform="cpu"), *tier((name, method))],
        )
        for name, method in CELLS
    ],
)
def test_a_quantized_checkpoint(name: str, method: str, tmp_path: Path) -> None:
    model = write_quantized(tmp_path, made(name), method)
    with served(tmp_path, "--max-total-tokens=512") as engine:
        resolved = engine.context.resolved
        assert resolved.config.model.dtype == "bfloat16"
        assert not resolved.config.weights.dequantize_weights
        worker = engine.executor.worker  # type: ignore[attr-defined]
        (weights,) = (line for line in worker.start.ledger.lines if line.name == WEIGHTS)
        if method == "bitsandbytes":  # a plan counts what any platform makes of blocks
            assert weights.measured <= weights.predicted
        else:
            assert weights.measured == weights.predicted
        experts = {each.implementation for each in worker.loaded.model.modules() if isinstance(each, ExpertWeights)}
        assert experts <= {"native"}
        results = engine.generate(requests(LENGTHS, prompt_logprobs=0))
    allowed = METHODS[method].allowed if method in METHODS else 2.0
    of = statistics.fmean if (name, method) in AVERAGED else MODELS[name].of
    assert_as_close_as_transformers(results, model, allowed, of=of, lengths=LENGTHS)

"""Quantized layers in host memory on a simulated GPU: the tokens, and the kernels, are those of weights on the device.

One case per op on quantized weights, and per number of tensors that a matrix has. How to run it: test_simulated.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import messages
from model_cells import prompts, served
from offloaded_weights import CASES

from srv.executor.in_process import InProcessExecutor
from srv.models.layers.op_layer import op_layers
from srv.planning.ledger import WEIGHTS
from srv.platform.manifest import Manifest
from srv.testing.engine import CheckedEngine

LENGTHS, OUTPUT = (1, 5), 4
NAMES = (
    *("gptq in another order", "experts of packed integers in another order"),
    *("experts in fp8", "experts in mxfp4", "several schemes", "int8wo"),
)


def _weights(engine: CheckedEngine) -> tuple[int, set[str]]:
    """Bytes of weights on the device, which were predicted, and the ops of layers in host memory."""
    assert isinstance(engine.executor, InProcessExecutor)
    worker = engine.executor.worker
    (line,) = (entry for entry in worker.start.ledger.lines if entry.name == WEIGHTS)
    assert line.measured == line.predicted
    assert line.measured is not None
    moved = [layer for layer in op_layers(worker.loaded.model, offloaded=True) if layer.offloaded]
    return line.measured, {layer.op for layer in moved}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_weights_on_the_device(name: str, manifest: Manifest, tmp_path: Path) -> None:
    case = CASES[name]
    with torch.inference_mode(False):
        path = case.write(tmp_path)
    flags = ["--max-total-tokens=512", "--max-running-requests=2", "--disable-graphs", "--page-size=16"]
    flags += [f"--{name.replace('_', '-')}={value}" for name, value in case.arguments.items() if value]
    runs: list[Any] = []
    for more in ([], ["--offload-group-size=1"]):
        with served(path, *flags, *more, device=manifest.name) as engine:
            assert {kernel.key: kernel.name for kernel in engine.context.kernels.kernels} == engine.ready.kernels
            tokens = [result.tokens for result in engine.generate(messages(prompts(LENGTHS), OUTPUT))]
            runs.append((tokens, engine.ready.kernels, *_weights(engine)))
    (resident, kernels, all_bytes, none), (moved, same, fewer, ops) = runs
    assert moved == resident
    assert same == kernels
    assert fewer < all_bytes
    assert not none
    assert ops >= case.ops

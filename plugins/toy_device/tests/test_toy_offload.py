"""Weights of layers in host memory: the tokens are the same, the device does not hold the weights, and no kernel reads
a buffer before its copy is done or while the next one is written, whatever order the streams allow.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from test_toy_engine import LENGTHS, PLAIN, messages, paged_engine
from transformers import LlamaConfig, LlamaForCausalLM

from srv.errors import Refusal
from srv.executor.in_process import InProcessExecutor
from srv.planning.budget import weight_bytes
from srv.testing.engine import LocalEngine
from srv_matrix.pytest_plugin import covers
from srv_toy_device.device import Accelerator

LAYERS = 5
ROUNDING = 512  # bytes: that of the device's allocator, per tensor
ALL = ("--offload-group-size", "1")


class Deep:
    """A random model on disk with more layers than buffers, and prompts."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
        )
        self.folder = folder
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        self.prompts = [[5 + length, *torch.randint(3, 61, (length - 1,)).tolist()] for length in LENGTHS]
        matrices = [parameter for parameter in model.model.layers[0].parameters() if parameter.dim() == 2]
        self.layer_bytes, self.layer_rows = sum(matrix.nbytes for matrix in matrices), sum(map(len, matrices))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Deep:
    return Deep(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def asynchronous(toy: Accelerator) -> Iterator[None]:
    """Operators and copies run when the host waits, each stream in an order of its own."""
    toy.synchronize()
    toy.deferral.enabled = True
    yield
    toy.synchronize()
    toy.deferral.enabled = False


def engine(small: Deep, *flags: str) -> AbstractContextManager[LocalEngine]:
    return paged_engine(small, "--chunked-prefill-size", "16", *flags)


class Served(NamedTuple):
    """The tokens of an engine, twice; bytes on the device, of everything and of its weights."""

    tokens: list[list[list[int]]]
    allocated: int
    weights: int


def serve(toy: Accelerator, small: Deep, *flags: str) -> Served:
    gc.collect()  # what is left of other engines
    toy.synchronize()
    others = toy.memory_allocated()
    with engine(small, *flags) as served:
        before = toy.pageable_copies
        tokens = [[list(result.tokens) for result in served.generate(messages(small))] for _ in range(2)]
        assert toy.pageable_copies == before
        assert isinstance(served.executor, InProcessExecutor)
        (line,) = (entry for entry in served.executor.worker.start.ledger.lines if entry.name == "weights")
        assert line.measured == line.predicted == weight_bytes(served.context.resolved.config, served.context.model)
        return Served(tokens, toy.memory_allocated() - others, line.measured)


@pytest.fixture(scope="module")
def resident(toy: Accelerator, small: Deep) -> Served:
    """With all weights on the device."""
    return serve(toy, small, "--disable-graphs")


def check(toy: Accelerator, small: Deep, resident: Served, layers: int, *flags: str) -> None:
    """`layers`: whose weights the device does not hold."""
    moved = serve(toy, small, *flags)
    assert moved.tokens == resident.tokens
    assert resident.weights - moved.weights == layers * small.layer_bytes
    assert abs(resident.allocated - moved.allocated - layers * small.layer_bytes) <= 4 * LAYERS * ROUNDING


@covers("host_offload_gb=1", platform="toy")
def test_host_offload_gb(toy: Accelerator, small: Deep, resident: Served) -> None:
    """All layers fit into one GiB, so that the device holds two of five."""
    check(toy, small, resident, 3, "--host-offload-gb", "1")


@covers("offload_group_size=1", platform="toy")
def test_offload_group_size(toy: Accelerator, small: Deep, resident: Served) -> None:
    check(toy, small, resident, 3, *ALL, PLAIN)
    with pytest.raises(Refusal) as refused, engine(small, "--offload-group-size", "3"):
        pass
    (rejection,) = refused.value.rejections
    assert (rejection.code, rejection.what) == ("inert", "offload_group_size")
    assert "1 layer would be moved, and 2 are on the device at a time" in rejection.reason


@covers("offload_num_in_group=1", "offload_num_in_group=2", platform="toy")
def test_offload_num_in_group(toy: Accelerator, small: Deep, resident: Served) -> None:
    """Layers 1, 2 and 4 of groups of three: those between are on the device."""
    check(toy, small, resident, 1, "--offload-group-size", "3", "--offload-num-in-group", "2")


@covers("offload_prefetch_step=1", "offload_prefetch_step=2", platform="toy")
@pytest.mark.parametrize("step", [1, 2, 3])
def test_offload_prefetch_step(toy: Accelerator, small: Deep, resident: Served, step: int) -> None:
    """Five layers and two, three or four buffers: around the end, a layer may have the buffer of the one before it."""
    check(toy, small, resident, 4 - step, *ALL, "--offload-prefetch-step", str(step))


def test_quantized_layers(toy: Accelerator, small: Deep) -> None:
    """Integers and their scales, which are one copy per layer."""
    flags = ("--torchao-config", "int8dq")
    resident, moved = serve(toy, small, "--disable-graphs", *flags), serve(toy, small, *ALL, *flags)
    assert moved.tokens == resident.tokens
    rows = small.layer_rows * 4  # bytes of scales
    assert resident.weights - moved.weights == (LAYERS - 2) * (small.layer_bytes // 4 + rows)
    assert resident.allocated - moved.allocated >= (LAYERS - 2) * small.layer_bytes // 4 - 8 * LAYERS * ROUNDING


def test_steps_are_not_captured(small: Deep) -> None:
    with engine(small, *ALL) as served:
        assert served.context.resolved.config.graphs.disable_graphs
    for flags in (("--enable-torch-compile",), ("--graph-max-batch-size", "4"), ("--enable-piecewise-graphs",)):
        with pytest.raises(Refusal) as refused, engine(small, *ALL, *flags):
            pass
        assert {rejection.code for rejection in refused.value.rejections} <= {"excluded", "capability_missing"}


def test_what_does_not_go_with_it_is_refused_by_name(small: Deep) -> None:
    for flags, what, reason in (
        ((*ALL, "--host-offload-gb", "1"), "offload_group_size", "chooses the layers already"),
        ((*ALL, "--offload-num-in-group", "2"), "offload_num_in_group", "offload_group_size is 1"),
        (("--offload-prefetch-step", "2"), "offload_prefetch_step", "no effect while host_offload_gb is 0"),
        (("--offload-group-size", "0"), "offload_group_size", "at least 1, or -1"),
        ((*ALL, "--model-impl", "transformers"), "offload_group_size", "only native layers"),
    ):
        with pytest.raises(Refusal) as refused, engine(small, *flags):
            pass
        assert (what, True) in {(rejection.what, reason in rejection.reason) for rejection in refused.value.rejections}

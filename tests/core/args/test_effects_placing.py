"""Arguments that place ranks have an effect: the device of each rank, and the NUMA node of its process.

Engines run in child processes: a simulated device is registered for good, and so is the binding of a process.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_small
import pytest
from engine_small import Small, engine, make_small, messages
from every import every

from srv.cli.main import main
from srv.executor.multi_process import MultiProcessExecutor
from srv.platform import numa
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

# Prints what the engine process of these arguments has: its device, and its processors and memory policies.
ENGINE = """
import json, os, sys
from srv.testing.engine import LocalEngine

with LocalEngine.launch(sys.argv[1:]) as engine:
    maps = open("/proc/self/numa_maps").read() if os.path.exists("/proc/self/numa_maps") else ""
    policies = sorted({line.split()[1] for line in maps.splitlines()})
    allowed = sorted(os.sched_getaffinity(0))
    memory = engine.executor.measure()[0]
    print(json.dumps({"device": engine.ready.device, "measured": memory.device, "policies": policies, "cpus": allowed}))
"""
# Prints the tokens that the engine of these arguments generates for a prompt.
TOKENS = """
import json, sys
from engine_small import messages
from srv.testing.engine import LocalEngine

with LocalEngine.launch(sys.argv[2:]) as engine:
    results = engine.generate(messages([json.loads(sys.argv[1])], 2))
    print(json.dumps({"device": engine.ready.device, "tokens": [result.tokens for result in results]}))
"""
TOY = bool(importlib.metadata.entry_points(group="srv.platforms", name="toy"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
    return make_small("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1, vocab_size=100, **sizes)


def engine_process(small: Small, *arguments: str, script: Sequence[str] = (ENGINE,), **environment: str) -> Any:
    """What the script, with its own arguments, prints for the engine of these arguments."""
    common = ("--model-path", str(small.folder), "--dtype", "float32", "--max-total-tokens", "64", "--disable-graphs")
    process = subprocess.run(
        [sys.executable, "-c", *script, *common, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.skipif(not TOY, reason="the plugin is not installed: pip install -e plugins/toy_device")
@covers("base_device_id=0", "base_device_id=1", platform="toy", level="E3")
def test_base_device_id(small: Small) -> None:
    """The engine computes on that device, and its memory is measured there."""
    for index in (0, 1):
        actual = engine_process(small, "--device", "toy", "--base-device-id", str(index), SRV_TOY_DEVICES="2")
        assert (actual["device"], actual["measured"]) == (f"toy:{index}", f"toy:{index}")


@pytest.mark.slow
def test_steps_run_on_the_device_of_their_engine(small: Small) -> None:
    """A thread of its own launches them: it has to select the device, on which Triton launches kernels."""
    pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")
    simulated = {"SRV_GPU_SIMULATOR": "sm90", "SRV_GPU_SIMULATOR_COUNT": "2"}
    paths = os.pathsep.join([str(Path(engine_small.__file__).parent), os.environ.get("PYTHONPATH", "")])
    script = (TOKENS, json.dumps(small.prompts[0]))
    flags = ("--device", "cuda", "--base-device-id", "1", "--attention-backend", "triton")
    actual = engine_process(small, *flags, script=script, **simulated, PYTHONPATH=paths, TRITON_INTERPRET="1")
    assert actual == {"device": "gpusim:1", "tokens": [small.tokens[0][:2]]}


@pytest.mark.slow
@covers("device_id_step=1", "device_id_step=2", platform="cuda", level="E3")
def test_device_id_step(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on simulated GPUs, also with captured steps: other devices, the same tokens as one rank's."""
    pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")
    monkeypatch.setenv("SRV_GPU_SIMULATOR", "sm90")
    monkeypatch.setenv("SRV_GPU_SIMULATOR_COUNT", "4")
    prompts, expected = small.prompts[:2], [tokens[:3] for tokens in small.tokens[:2]]
    steps: dict[int, dict[str, object]] = {
        1: {"attention_backend": "triton", "graph_batch_sizes": "2"},
        2: {"attention_backend": "torch_native", "disable_graphs": True, "base_device_id": 1},
    }
    devices = {}
    for step, flags in steps.items():
        common: dict[str, Any] = {"device": "cuda", "page": 16, "pool": 256, "sampling_backend": "pytorch"}
        with engine(small, **common, tp_size=2, device_id_step=step, **flags) as served:
            assert isinstance(served.executor, MultiProcessExecutor)
            devices[step] = [rank.device for rank in served.executor.measure()]
            assert [result.tokens for result in served.generate(messages(prompts, 3))] == expected
            assert served.ready.graph_rows == ([2] if step == 1 else [])
    assert devices == {1: ["gpusim:0", "gpusim:1"], 2: ["gpusim:1", "gpusim:3"]}


@pytest.mark.skipif(numa.why_unfit(0) is not None, reason=f"it needs a NUMA node 0: {numa.why_unfit(0)}")
@covers("numa_node=0", platform="cpu")
def test_numa_node(small: Small) -> None:
    """The engine's process runs on the node's processors and prefers its memory; otherwise, both are as they were."""
    node = 0
    usable = os.sched_getaffinity(0)
    free = engine_process(small, "--device", "cpu")
    bound = engine_process(small, "--device", "cpu", "--numa-node", str(node))
    assert set(free["cpus"]) == usable
    assert set(bound["cpus"]) == usable & numa.processors(node)
    if not free["policies"]:
        pytest.skip("this kernel has no /proc/self/numa_maps, which shows memory policies")
    assert f"prefer:{node}" not in free["policies"]
    assert f"prefer:{node}" in bound["policies"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    return capsys.readouterr().err


FOUR = ("--device", "cuda:sm90,count=4")


@every(
    ("arguments", "text"),
    [
        (
            (*FOUR, "--base-device-id", "4"),
            "base_device_id = 4 (set by command line): there are 4 devices, and the largest index is 3. ",
        ),
        (
            (*FOUR, "--base-device-id", "3", "--tp-size", "2"),
            "base_device_id = 3 (set by command line): rank 1 would get device 4 (base_device_id 3 + 1 x "
            "device_id_step 1), but there are 4 devices, and the largest index is 3. ",
        ),
        (
            (*FOUR, "--base-device-id", "1", "--tp-size", "2", "--device-id-step", "3"),
            "device_id_step = 3 (set by command line): rank 1 would get device 4 (base_device_id 1 + 1 x "
            "device_id_step 3), but there are 4 devices, and the largest index is 3. ",
        ),
        (
            ("--device", "cuda:sm90", "--tp-size", "2"),
            "tp_size = 2 (set by command line): each rank needs a device of its own, but there is one device. ",
        ),
        (
            ("--device", "cpu:avx2", "--base-device-id", "1"),
            "base_device_id = 1 (set by command line): all ranks of this platform compute in host memory: there are no "
            "numbered devices. ",
        ),
        (
            ("--device", "cpu:avx2", "--tp-size", "3", "--device-id-step", "2"),
            "device_id_step = 2 (set by command line): all ranks of this platform compute in host memory: there are no "
            "numbered devices. ",
        ),
        (
            ("--device", "cpu:avx2", "--tp-size", "3", "--numa-node", "0", "1"),
            "numa_node = 0,1 (set by command line): the number of its nodes is 2, that of ranks 3 (tp_size x dp_size).",
        ),
    ],
)
def test_refusals(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each names the value at fault, who set it, and the numbers."""
    assert text in refused(capsys, *arguments)


def test_a_node_that_does_not_exist_is_refused_with_those_that_do(
    small: Small, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where the engine would run: a plan may be for another host."""
    arguments = ("--model-path", str(small.folder), "--device", "cpu", "--numa-node", "4000")
    assert main(["launch", *arguments]) == 2
    error = capsys.readouterr().err
    reason = numa.why_unfit(4000)
    assert reason is not None
    assert f"numa_node = 4000 (set by command line): {reason}. " in error
    assert main(["plan", *arguments]) == 0

"""`srv launch` on simulated GPUs answers over HTTP as on the CPU, in float32, and says that the device is simulated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from child_pytest import ROOT
from e2e_support import greedy, served

from srv.testing.conformance.facts import small_model
from srv.testing.conformance.small import write_model

pytest.importorskip("triton", reason="the kernels of GPUs need Triton: pip install triton")

SIMULATOR = ROOT / "plugins" / "gpu_simulator"
SMALL = ("--max-total-tokens", "512", "--max-running-requests", "2")
# Slots for drafts, chunks shorter than the prompt, and captured steps, which xpu has not.
DRAFTS = ("--speculative-algorithm", "NGRAM", "--chunked-prefill-size", "16")
PROMPT = "the cat sat on the mat and the cat sat on "
pytestmark = [pytest.mark.e2e, pytest.mark.proof(minutes=0.5), pytest.mark.timeout(900)]


def simulated(variant: str, **more: str) -> dict[str, str]:
    paths = (str(SIMULATOR), os.environ.get("PYTHONPATH"))
    return {"SRV_GPU_SIMULATOR": variant, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a token per byte."""
    return write_model(tmp_path_factory.mktemp("model") / "two-layers", small_model("float32"))


@pytest.fixture(scope="module")
def on_cpu(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    with served(tmp_path_factory.mktemp("cpu") / "log", "--device", "cpu", "--model-path", str(two_layers)) as server:
        tokens: list[int] = server.generate(**greedy(PROMPT, 6))["output_ids"]
    assert len(tokens) == 6
    return tokens


@pytest.mark.parametrize(
    ("platform", "variant", "arguments"), [("cuda", "sm90", DRAFTS), ("rocm", "gfx942", ()), ("xpu", "bmg", ())]
)
def test_two_layers(
    platform: str, variant: str, arguments: tuple[str, ...], two_layers: Path, on_cpu: list[int], tmp_path: Path
) -> None:
    """The second answer begins with cached pages."""
    launch = ("--device", platform, "--model-path", str(two_layers), *SMALL, *arguments)
    with served(tmp_path / "log", *launch, environment=simulated(variant)) as server:
        answers = [server.generate(**greedy(PROMPT, 6)) for _ in range(2)]
        info = server.get("/get_server_info").json()
        assert server.wait_pages_back()["srv_kv_pages_held"] == 0
        assert "runs in software because SRV_GPU_SIMULATOR is set" in server.log_text()
    assert [answer["output_ids"] for answer in answers] == [on_cpu, on_cpu]
    assert answers[1]["meta_info"]["cached_tokens"] > 0
    assert (info["platform"], info["device"]["variant"], info["device"]["simulated"]) == (platform, variant, True)
    assert {kernel["key"]: kernel["running"] for kernel in info["kernels"]} == {
        kernel["key"]: kernel["implementation"] for kernel in info["kernels"]
    }


def test_the_demo_model(tmp_path: Path) -> None:
    """Its GGUF blocks are multiplied by the reference of their op, since the interpreter needs minutes per token."""
    arguments = ("--dtype", "float32", "--disable-graphs", *SMALL)
    question = greedy("The capital of France is", 3)
    with served(tmp_path / "cpu.log", "--device", "cpu", "--dequantize-weights", *arguments) as server:
        expected = server.generate(**question)["output_ids"]
    environment = simulated("sm90", SRV_GPU_SIMULATOR_REFERENCE="linear_gguf,rows_gguf")
    with served(tmp_path / "cuda.log", "--device", "cuda", *arguments, environment=environment) as server:
        assert server.generate(**question)["output_ids"] == expected
        assert "no kernel runs for linear_gguf, rows_gguf" in server.log_text()

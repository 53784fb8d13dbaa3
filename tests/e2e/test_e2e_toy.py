"""A third party's platform serves over HTTP: the simulated accelerator has the same outputs as the CPU."""

from __future__ import annotations

import importlib.metadata

import pytest
from e2e_support import greedy, served

ENTRY_POINTS = importlib.metadata.entry_points(group="srv.platforms", name="toy")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not ENTRY_POINTS, reason="the plugin is not installed: pip install -e plugins/toy_device"),
]

ARGUMENTS = ("--dtype", "float32", "--dequantize-weights", "--max-total-tokens", "1024")
QUESTION = greedy("The capital of France is", 8)


def test_toy_device_answers_as_the_cpu_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    answers = {}
    for device in ("cpu", "toy"):
        with served(tmp_path_factory.mktemp(device) / "log", "--device", device, *ARGUMENTS) as server:
            answers[device] = server.generate(**QUESTION)["output_ids"]
            assert server.get("/get_server_info").json()["platform"] == device
            assert server.wait_pages_back()["srv_kv_pages_held"] == 0
    assert answers["toy"] == answers["cpu"]
    assert len(answers["toy"]) == 8

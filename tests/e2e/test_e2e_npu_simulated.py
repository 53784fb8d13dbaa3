"""`srv launch --device npu` on a simulated device serves the demo model, and reports that the device is simulated."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from e2e_support import clean_environment, greedy, served, srv_command

SIMULATOR = Path(__file__).parents[2] / "plugins" / "npu_simulator"
ENVIRONMENT = {
    "SRV_NPU_SIMULATOR": "a2",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(SIMULATOR), os.environ.get("PYTHONPATH")))),
}
ARGUMENTS = ("--dtype", "float16", "--max-total-tokens", "2048", "--max-running-requests", "4")
QUESTION = greedy("The capital of France is", 8)
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def platforms(**environment: str) -> dict[str, object]:
    """The npu row of `srv platforms --json`."""
    process = subprocess.run(
        srv_command("platforms", "--json", "--timeout", "120"),
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    rows: list[dict[str, object]] = json.loads(process.stdout)
    return next(row for row in rows if row["platform"] == "npu")


def test_it_answers_as_the_cpu_does_and_says_that_it_is_simulated(tmp_path: Path) -> None:
    with served(tmp_path / "cpu.log", "--device", "cpu", *ARGUMENTS) as server:
        expected = server.generate(**QUESTION)
    with served(tmp_path / "npu.log", "--device", "npu", *ARGUMENTS, environment=ENVIRONMENT) as server:
        answer = server.generate(**QUESTION)
        info = server.get("/get_server_info").json()
        assert server.wait_pages_back()["srv_kv_pages_held"] == 0
        assert "is simulated in software" in server.log_text()
    assert answer["output_ids"] == expected["output_ids"]
    assert (info["platform"], info["device"]["variant"], info["device"]["simulated"]) == ("npu", "a2", True)
    assert "simulated" in info["device"]["name"]
    assert info["page_size"] == 128
    kernels = {kernel["key"]: kernel["implementation"] for kernel in info["kernels"]}
    assert {kernel["key"]: kernel["running"] for kernel in info["kernels"]} == kernels
    assert "torch_npu (npu_swiglu)" in kernels.values()


def test_a_profile_of_another_generation_is_refused(tmp_path: Path) -> None:
    process = subprocess.run(
        srv_command("launch", "--device", "npu:a3", *ARGUMENTS),
        env={**clean_environment(), **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 2
    assert "this machine has a2" in process.stderr
    assert "variant_mismatch" in process.stderr


def test_platforms_shows_it_as_simulated_only_while_it_is_asked_for() -> None:
    there = platforms(**ENVIRONMENT)
    assert (there["available"], there["simulated"]) == (True, True)
    assert "simulated" in str(there["device"])
    absent = platforms(PYTHONPATH=ENVIRONMENT["PYTHONPATH"])
    assert (absent["available"], absent["simulated"], absent["code"]) == (False, False, "torch_npu_missing")


def test_automatic_choice_passes_over_it() -> None:
    """The CPU is chosen although the platform has a higher priority."""
    script = (
        "from srv.platform.choose import choose\n"
        "from srv.platform.registry import find_platforms\n"
        "found = find_platforms()\n"
        "chosen = choose(None, {name: found[name] for name in ('cpu', 'npu')}, timeout_s=120)\n"
        "print(chosen.installed.name, '|', chosen.reason)\n"
    )
    process = subprocess.run(
        [srv_command()[0], "-c", script],
        env={**clean_environment(), **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    name, _, why = process.stdout.partition(" | ")
    assert name == "cpu"
    assert "a simulated one is never chosen automatically" in why

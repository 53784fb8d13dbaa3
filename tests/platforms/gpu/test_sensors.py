"""The sensors of GPUs on the simulator's stand-ins of the vendors' libraries, and without a library."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from every import every
from rules_world import FACTS, GIB

from srv.platform.registry import find_platforms
from srv.platform.sensors import Readings
from srv_gpu.sensors import is_visible
from srv_gpu.simulator import VARIABLE, simulated_facts

PYNVML, AMDSMI = "srv_gpu_simulator.pynvml", "srv_gpu_simulator.amdsmi"


def read(platform: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> Readings:
    monkeypatch.setenv(VARIABLE, variant)
    facts = simulated_facts(variant, FACTS[platform].profiles, {})
    return find_platforms()[platform].loaded.sensors(facts)


@pytest.mark.parametrize(
    ("platform", "variant", "name", "memory", "power", "throttle"),
    [
        ("cuda", "sm90", "NVIDIA H100 80GB HBM3 (simulated)", 80, 50, 5),
        ("cuda", "sm86", "NVIDIA GeForce RTX 3090 (simulated)", 24, None, 5),
        ("rocm", "gfx942", "AMD Instinct MI300X (simulated)", 192, 50, 2),
        ("rocm", "gfx1100", "AMD Radeon RX 7900 XTX (simulated)", 24, 50, 0),
    ],
)
def test_a_simulated_gpu_reports_what_a_real_one_would(
    platform: str,
    variant: str,
    name: str,
    memory: int,
    power: float | None,
    throttle: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = read(platform, variant, monkeypatch)
    assert readings.missing == ""
    (reading,) = readings.devices
    assert (reading.device, reading.name, reading.power) == ("0", name, power)
    assert (reading.utilization, reading.temperature) == (0, 25)
    assert (reading.memory_used, reading.memory_total) == (0, memory * GIB)
    assert list(reading.throttle.values()) == [False] * throttle
    closed = importlib.import_module(PYNVML if platform == "cuda" else AMDSMI)
    with pytest.raises((closed.NVMLError if platform == "cuda" else closed.AmdSmiException), match=r"(?i)init"):
        closed.nvmlDeviceGetCount() if platform == "cuda" else closed.amdsmi_get_processor_handles()


def test_devices_that_are_not_visible_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert read("cuda", "sm90", monkeypatch) == Readings()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-simulated-sm9")
    assert len(read("cuda", "sm90", monkeypatch).devices) == 1


@every(
    ("text", "visible"),
    [(None, True), ("", False), ("0", False), ("2,3", True), ("GPU-1", False), ("GPU-7a", True), ("0, GPU-7a3", True)],
)
def test_devices_are_selected_by_index_or_uuid(text: str | None, visible: bool) -> None:
    assert is_visible(3, "GPU-7a3e", "V", {} if text is None else {"V": text}) == visible


@every(
    ("platform", "profile", "missing", "remedy"),
    [
        ("cuda", "sm90", "the Python package nvidia-ml-py ", "pip install nvidia-ml-py"),
        ("rocm", "gfx942", "the Python package amdsmi ", "/opt/rocm/share/amd_smi"),
        ("xpu", "pvc", "there is no Python package for the sensors of Intel GPUs", ""),
    ],
)
def test_without_a_library_the_doctor_is_told_how_to_get_it(
    platform: str, profile: str, missing: str, remedy: str
) -> None:
    """In a process that finds only srv: a machine that has the libraries must not change the result."""
    code = f"""
import json, sys
for name in ("pynvml", "amdsmi"): sys.modules[name] = None
from srv.platform.registry import find_platforms
manifest = find_platforms()[{platform!r}].loaded
found = manifest.sensors(manifest.facts.profiles[{profile!r}])
print(json.dumps([len(found.devices), found.missing, found.remedy, "torch" in sys.modules]))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    count, reason, advice, torch = json.loads(process.stdout)
    assert (count, torch) == (0, False)
    assert missing in reason
    assert remedy in advice
    assert bool(advice) == bool(remedy)


def test_the_stand_in_of_pynvml_has_its_signatures_and_constants() -> None:
    real = pytest.importorskip("pynvml", reason="compared with the real package: pip install nvidia-ml-py")
    stand_in = importlib.import_module(PYNVML)
    functions = [name for name, value in vars(stand_in).items() if inspect.isfunction(value) and name[:4] == "nvml"]
    assert len(functions) == 11
    for name in functions:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (stand_in, real))
        assert list(ours) == list(theirs), name
    for name in (name for name, value in vars(stand_in).items() if isinstance(value, int) and name[0] != "_"):
        assert getattr(stand_in, name) == getattr(real, name), name


def test_platforms_without_sensors_report_none_and_claim_no_fault() -> None:
    manifest = find_platforms()["cpu"].loaded
    device = replace(next(iter(manifest.facts.profiles.values())), count=1)
    assert manifest.sensors(device) == Readings()


def test_stand_ins_import_no_torch() -> None:
    code = f"import sys, {PYNVML}, {AMDSMI}; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.strip() == "False"

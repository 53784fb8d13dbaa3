"""The SDK that the NPU platform loads, its refusals, and the result of its probe for the devices that the SDK sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from srv.errors import PlatformUnavailable
from srv_npu import probe as npu
from srv_npu.sdk import SIMULATOR_VARIABLE, load_sdk, simulated_device
from srv_npu.soc import generation_of, variant_of

GIB = 1 << 30


def sdk(soc: int, name: str, count: int = 1, available: bool = True) -> Any:
    """An SDK that sees `count` devices of 64 GiB, and knows their SoC number only once one is selected."""
    selected: list[int] = []

    def get_soc_version() -> int:
        assert selected == [0]
        return soc

    return SimpleNamespace(
        npu=SimpleNamespace(
            is_available=lambda: available,
            device_count=lambda: count,
            set_device=selected.append,
            get_soc_version=get_soc_version,
            get_device_properties=lambda index: SimpleNamespace(name=name, total_memory=64 * GIB),
        )
    )


@pytest.mark.parametrize(
    ("soc", "variant"),
    [(219, None), (220, "a2"), (225, "a2"), (226, None), (249, None), (250, "a3"), (255, "a3"), (256, None)],
)
def test_the_variant_comes_from_the_soc_number(soc: int, variant: str | None) -> None:
    assert variant_of(soc) == variant


@pytest.mark.parametrize(
    ("soc", "name", "reason"),
    [
        (202, "Ascend310P3", "Ascend310P3 is Ascend 310P, which is not supported yet"),
        (260, "Ascend950", "Ascend950 is A5 (Ascend 950), which is not supported yet"),
        (103, "Ascend910B", "Ascend910B is Ascend 910A, which is not supported yet"),
        (777, "Thing", "Thing is an unknown generation (SoC number 777), which is not supported yet"),
    ],
)
def test_other_generations_are_recognised_and_refused(soc: int, name: str, reason: str) -> None:
    result = npu.look(sdk(soc, name), simulated=False)
    assert (result.available, result.code, result.reason) == (False, "unsupported_variant", reason)
    assert "A2" in result.remedy
    assert generation_of(soc) in reason


def test_real_devices_are_described_as_the_sdk_sees_them() -> None:
    result = npu.look(sdk(250, "Ascend910_9391", count=16), simulated=False)
    assert result.available
    assert result.device is not None
    described = (result.device.variant, result.device.count, result.device.memory_bytes, result.device.name)
    assert described == ("a3", 16, 64 * GIB, "Ascend910_9391")
    assert not result.device.simulated
    assert result.notes == ()


@pytest.mark.parametrize("name", ["Ascend910B3", "Ascend910B3 (simulated)"])
def test_a_simulated_device_is_named_so_and_has_a_note(name: str) -> None:
    result = npu.look(sdk(222, name), simulated=True)
    assert result.device is not None
    assert (result.device.name, result.device.simulated) == ("Ascend910B3 (simulated)", True)
    assert "simulated in software" in result.notes[0]


@pytest.mark.parametrize("seen", [sdk(220, "", count=0), sdk(220, "", available=False)])
def test_an_sdk_without_devices_suggests_to_check_the_visible_devices(seen: Any) -> None:
    result = npu.look(seen, simulated=False)
    assert (result.available, result.code) == (False, "no_device")
    assert "ASCEND_RT_VISIBLE_DEVICES" in result.remedy


def test_nothing_is_simulated_by_default() -> None:
    assert simulated_device({}) is None
    assert simulated_device({SIMULATOR_VARIABLE: ""}) is None
    assert simulated_device({SIMULATOR_VARIABLE: "a3"}) == "a3"
    with pytest.raises(PlatformUnavailable) as raised:
        load_sdk({})
    assert raised.value.code == "torch_npu_missing"


def test_an_unknown_simulated_device_is_refused_by_name() -> None:
    with pytest.raises(PlatformUnavailable) as raised:
        load_sdk({SIMULATOR_VARIABLE: "a9"})
    assert raised.value.code == "unknown_simulated_device"
    assert "SRV_NPU_SIMULATOR=a9 (set by the environment)" in raised.value.reason
    assert "a2, a2-32g, a3" in raised.value.remedy


def refused_with(tmp_path: Path, *packages: str) -> str:
    """The refusal to simulate, in a process in which only these vendor packages exist, each empty."""
    for package in packages:
        (tmp_path / f"{package}.py").write_text("")
    script = """
import importlib.util, json, sys
found = importlib.util.find_spec
only = set(json.loads(sys.argv[1]))
importlib.util.find_spec = lambda name, *rest: (
    None if name in ("torch_npu", "srv_npu_simulator") and name not in only else found(name, *rest))
from srv.errors import PlatformUnavailable
from srv_npu.sdk import load_sdk
try:
    load_sdk()
except PlatformUnavailable as error:
    print(error.code, error.reason, error.remedy, sep="|")
"""
    environment = {**os.environ, SIMULATOR_VARIABLE: "a2", "PYTHONPATH": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", script, json.dumps(packages)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return process.stdout.strip()


def test_the_simulator_is_not_loaded_if_a_real_sdk_is_installed(tmp_path: Path) -> None:
    code, reason, remedy = refused_with(tmp_path, "torch_npu", "srv_npu_simulator").split("|")
    assert code == "simulator_beside_sdk"
    assert "torch_npu is installed here" in reason
    assert "Unset SRV_NPU_SIMULATOR" in remedy


def test_a_missing_simulator_is_reported(tmp_path: Path) -> None:
    code, reason, remedy = refused_with(tmp_path).split("|")
    assert code == "simulator_missing"
    assert "srv-npu-simulator is not installed" in reason
    assert "pip install" in remedy


def test_the_package_can_be_imported_without_torch_or_sdk() -> None:
    """Except the modules that run in workers, which are imported by `create`."""
    script = (
        "import sys; import srv_npu.manifest, srv_npu.sdk, srv_npu.soc, srv_npu.limits;"
        "print(sorted({'torch', 'torch_npu', 'srv_npu_simulator'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.strip() == "[]"

"""What only the simulated device has: the memory that it was given, and its probe."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from srv.errors import PlatformUnavailable
from srv.platform.manifest import ProbeContext
from srv_toy_device.device import Accelerator
from srv_toy_device.facts import VARIANT
from srv_toy_device.manifest import MANIFEST, probe
from srv_toy_device.platform import ToyPlatform
from srv_toy_device.settings import device_memory

CONTEXT = ProbeContext(timeout_s=5.0)


def test_it_is_never_chosen_automatically() -> None:
    assert MANIFEST.simulated


def test_a_device_that_is_not_there_is_refused(toy: Accelerator) -> None:
    with pytest.raises(PlatformUnavailable, match="device 1 is needed, but this host has 1"):
        ToyPlatform(toy).device(1)


def test_exhausting_the_memory_says_what_to_set(toy: Accelerator) -> None:
    free, _ = toy.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match=r"toy:0 is out of memory.*SRV_TOY_MEMORY"):
        torch.empty(free + 1, dtype=torch.uint8, device="toy")
    assert toy.mem_get_info()[0] == free


@pytest.mark.parametrize(
    ("text", "size"), [(None, 2 << 30), ("1048576", 1 << 20), ("512MiB", 512 << 20), ("1.5 GiB", 3 << 29)]
)
def test_the_size_is_read_from_the_environment(text: str | None, size: int) -> None:
    assert device_memory({} if text is None else {"SRV_TOY_MEMORY": text}) == size


@pytest.mark.parametrize("text", ["", "much", "0", "-1GiB", "4GB", "nan"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SRV_TOY_MEMORY"):
        device_memory({"SRV_TOY_MEMORY": text})


def test_the_probe_reports_the_memory_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRV_TOY_MEMORY", "3GiB")
    result = probe(CONTEXT)
    assert result.available
    assert result.device is not None
    assert (result.device.memory_bytes, result.device.count, result.device.variant) == (3 << 30, 1, VARIANT)
    assert result.device.versions == {"torch": importlib.metadata.version("torch")}


def test_the_probe_refuses_a_size_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRV_TOY_MEMORY", "lots")
    result = probe(CONTEXT)
    assert not result.available
    assert result.code == "bad_setting"
    assert "SRV_TOY_MEMORY = 'lots'" in result.reason


@pytest.mark.parametrize(("text", "available"), [("", False), ("def _setup_privateuseone_for_python_backend", True)])
def test_the_probe_looks_for_what_it_needs_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, available: bool
) -> None:
    monkeypatch.delenv("SRV_TOY_MEMORY")
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "backend_registration.py").write_text(text)
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr("srv_toy_device.manifest.importlib.util.find_spec", lambda name: spec)
    result = probe(CONTEXT)
    assert result.available is available
    assert available or result.code == "torch_too_old"
    monkeypatch.setattr("srv_toy_device.manifest.importlib.util.find_spec", lambda name: None)
    assert probe(CONTEXT).code == "torch_missing"

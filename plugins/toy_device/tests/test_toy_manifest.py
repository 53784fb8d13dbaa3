"""The manifest: found by entry point, free of torch, truthful about this machine."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from srv.platform.capabilities import CAPABILITIES
from srv.platform.checks import check_manifest
from srv.platform.facts import Requires, Unfit
from srv.platform.manifest import ProbeContext
from srv.specs import CacheSpec, FullAttention, SlidingWindow
from srv_toy_device import facts
from srv_toy_device.manifest import MANIFEST, probe

CONTEXT = ProbeContext(timeout_s=5.0)


def test_it_is_found_by_entry_point() -> None:
    (found,) = importlib.metadata.entry_points(group="srv.platforms", name="toy")
    assert found.dist is not None
    assert found.dist.name == "srv-toy-device"
    assert found.load() is MANIFEST


def test_it_keeps_the_contract_and_is_never_chosen_automatically() -> None:
    assert check_manifest(MANIFEST, "srv-toy-device", "0.1.0", "toy") is MANIFEST
    assert MANIFEST.simulated
    assert MANIFEST.facts.capabilities(MANIFEST.facts.profiles["toy1"]) <= CAPABILITIES.keys()


def test_neither_the_manifest_nor_the_probe_imports_torch() -> None:
    program = (
        "import sys\n"
        "from srv.platform.manifest import ProbeContext\n"
        "from srv_toy_device.manifest import MANIFEST\n"
        "assert MANIFEST.probe(ProbeContext(5.0)).available\n"
        "print([name for name in ('torch', 'numpy', 'srv_kernels') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_probe_reports_the_memory_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRV_TOY_MEMORY", "3GiB")
    result = probe(CONTEXT)
    assert result.available
    assert result.device is not None
    assert (result.device.memory_bytes, result.device.count, result.device.variant) == (3 << 30, 1, "toy1")
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


class _Seen:
    def __init__(self, *groups: CacheSpec) -> None:
        self.model = type("Model", (), {"cache_groups": groups}) if groups else None


def test_attention_says_which_models_it_cannot_serve() -> None:
    full, window = FullAttention((0,), 2, 16, 16), SlidingWindow((1,), 2, 16, 16, 8)
    assert isinstance(facts.check_attention(_Seen()), Requires)  # type: ignore[arg-type]
    assert isinstance(facts.check_attention(_Seen(full, window)), Requires)  # type: ignore[arg-type]
    against = facts.check_attention(_Seen(FullAttention((0,), 1, 576, 512)))  # type: ignore[arg-type]
    assert isinstance(against, Unfit)
    assert len(against.reasons) == 1

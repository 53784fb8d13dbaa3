"""The manifest: found by entry point, free of torch, truthful about this machine."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

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


def test_it_keeps_the_contract_and_is_chosen_automatically_only_if_it_is_hardware() -> None:
    assert check_manifest(MANIFEST, "srv-toy-device", "0.1.0", "toy") is MANIFEST
    assert MANIFEST.simulated or MANIFEST.priority > 0
    for device in MANIFEST.facts.profiles.values():
        assert MANIFEST.facts.capabilities(device) <= CAPABILITIES.keys()


def test_the_probe_finds_a_device_or_says_what_to_do() -> None:
    result = probe(CONTEXT)
    if result.available:
        assert result.device is not None
        assert result.device.variant in MANIFEST.variants
    else:
        assert result.reason
        assert result.remedy
        assert result.code


def test_neither_the_manifest_nor_the_probe_imports_torch() -> None:
    program = (
        "import sys\n"
        "from srv.platform.manifest import ProbeContext\n"
        "from srv_toy_device.manifest import MANIFEST\n"
        "MANIFEST.probe(ProbeContext(5.0))\n"
        "print([name for name in ('torch', 'numpy', 'srv_kernels') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


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

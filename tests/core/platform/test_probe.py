"""Probes in child processes: whatever a plugin does there, the result here has a reason and a remedy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from platform_plugins import manifest_source, write_plugin

from srv.platform.facts import DeviceFacts
from srv.platform.manifest import ProbeResult
from srv.platform.probe import probe, probe_all
from srv.platform.registry import InstalledPlatform, find_platforms

DEVICE = DeviceFacts("one", 1 << 30, 2, "Example device", {"driver": "1.0"}, ("fast",))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(folder: Path, name: str, body: str, after: str = "") -> None:
    write_plugin(folder, name, manifest_source(name, probe=body, after=after))


def test_device_facts_are_transferred_unchanged(plugins: Path) -> None:
    write(plugins, "facts", "return ProbeResult(True, device=DEVICE, notes=('warm',))")
    assert probe(find_platforms()["facts"]) == ProbeResult(True, device=DEVICE, notes=("warm",))


def test_refusal_is_transferred_unchanged(plugins: Path) -> None:
    write(plugins, "refuses", "return ProbeResult(False, 'no driver', 'Install it', 'driver_missing')")
    assert probe(find_platforms()["refuses"]) == ProbeResult(False, "no driver", "Install it", "driver_missing")


BAD_PROBES = {
    "crashes": ("import os; os.kill(os.getpid(), 11)", "probe_crashed", "SIGSEGV"),
    "leaves": ("import os, sys; print('bye', file=sys.stderr, flush=True); os._exit(7)", "probe_crashed", "(bye)"),
    "exits": ("raise SystemExit(0)", "probe_raised", "SystemExit"),
    "raises": ("raise ValueError('odd driver')", "probe_raised", "ValueError: odd driver (manifest.py:"),
    "wrong_type": ("return {'available': True}", "probe_garbage", "returned a dict"),
    "wrong_field": ("return ProbeResult(True, device='gpu')", "probe_garbage", "wrong type"),
    "silent": ("return ProbeResult(False)", "probe_garbage", "without reason"),
    "vague": ("return ProbeResult(True)", "probe_garbage", "describes no device"),
    "forger": (
        "import os; [os.write(fd, b'garbage') for fd in range(3, 256) if os.path.exists(f'/proc/self/fd/{fd}')]",
        "probe_garbage",
        "cannot be parsed",
    ),
}


def test_bad_probes_become_results(plugins: Path) -> None:
    for name, (body, _, _) in BAD_PROBES.items():
        write(plugins, name, body)
    installed = find_platforms()
    results = probe_all({name: installed[name] for name in BAD_PROBES})
    for name, (_, code, reason) in BAD_PROBES.items():
        result = results[name]
        assert (result.available, result.code) == (False, code), name
        assert reason in result.reason
        assert f"srv-{name}" in result.remedy


def test_output_of_a_probe_does_not_affect_its_result(plugins: Path) -> None:
    noise = "print('noise ' * 200000); import os; os.system('echo more; echo noise >&2')"
    body = f"{noise}; return ProbeResult(True, device=DEVICE)"
    write(plugins, "chatty", body)
    assert probe(find_platforms()["chatty"]).available


def test_hanging_probe_is_killed_with_its_children(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still until the probe has started its child: then the time is up."""
    pid_file = tmp_path / "pid"
    times = iter([0.0])

    def monotonic() -> float:
        if (begin := next(times, None)) is not None:
            return begin
        assert _holds(lambda: pid_file.exists() and pid_file.read_text() != "")
        return 1000.0

    monkeypatch.setattr("srv.platform.probe.time", SimpleNamespace(monotonic=monotonic))
    body = (
        "import subprocess, pathlib, time; "
        f"pathlib.Path({str(pid_file)!r}).write_text(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    )
    write(plugins, "hangs", body)
    result = probe(find_platforms()["hangs"], timeout_s=1.5)
    assert result.code == "probe_timeout"
    assert "1.5 s" in result.reason
    pid = int(pid_file.read_text())
    ended = _holds(lambda: _has_ended(pid))  # long before it would end by itself
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended


def test_a_manifest_that_is_slow_to_import_is_not_blamed_on_its_probe(
    plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent imports the manifest quickly; in the child the import takes longer than the time limit."""
    slow = "import os, time; time.sleep(float(os.environ.get('SRV_TEST_IMPORT_SECONDS', '0')))"
    write(plugins, "late", "return ProbeResult(False, 'no card', 'Plug one in', 'no_card')", after=slow)
    platform = find_platforms()["late"]
    assert platform.error is None
    monkeypatch.setenv("SRV_TEST_IMPORT_SECONDS", "60")
    result = probe(platform, timeout_s=2)
    assert (result.available, result.code) == (False, "manifest_timeout")
    assert result.reason == "its manifest was not imported within 2 s, so its probe did not run"


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or dead and waiting to be collected."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _holds(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds. False if it does not for a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_manifest_that_imports_torch_is_detected_in_the_child(plugins: Path) -> None:
    """This process may have imported torch already, but the child has not."""
    write(plugins, "heavy", "return ProbeResult(True, device=DEVICE)")
    platform = find_platforms()["heavy"]
    module = plugins / "plugin_heavy" / "manifest.py"
    module.write_text(f"{module.read_text()}\nimport torch\n")
    result = probe(platform)
    assert result.code == "manifest_impure"
    assert "torch" in result.reason


def test_torch_autoload_is_off_in_the_child(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    body = "import os; return ProbeResult(False, os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'], 'none', 'shown')"
    write(plugins, "autoload", body)
    assert probe(find_platforms()["autoload"]).reason == "0"


def test_bad_probes_do_not_delay_the_others(plugins: Path) -> None:
    write(plugins, "slow", "import time; time.sleep(60)")
    write(plugins, "quick", "return ProbeResult(True, device=DEVICE)")
    write(plugins, "dead", "import os; os.abort()")
    platforms = {name: platform for name, platform in find_platforms().items() if name in ("slow", "quick", "dead")}
    begin = time.monotonic()
    assert probe(platforms["quick"]).available
    results = probe_all(platforms, timeout_s=1 + 20 * (time.monotonic() - begin))  # much, however busy the machine is
    assert list(results) == list(platforms)
    assert results["quick"].available
    assert results["dead"].code == "probe_crashed"
    assert results["slow"].code == "probe_timeout"


def test_a_refused_plugin_is_not_started(plugins: Path) -> None:
    write(plugins, "refused", "return 1", after="raise RuntimeError('half installed')")
    platform = find_platforms()["refused"]
    result = probe(platform)
    assert result.code == "plugin_refused"
    assert "half installed" in result.reason


def test_no_platforms_give_no_results() -> None:
    empty: dict[str, InstalledPlatform] = {}
    assert probe_all(empty) == {}

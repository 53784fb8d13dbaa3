"""`srv doctor` in a separate process, with real distributions on the import path: good, broken and misbehaving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from every import every
from platform_plugins import manifest_source, write_plugin

from srv.platform import environment
from srv.platform.doctor import examine
from srv.platform.finding import Finding
from srv.platform.registry import find_platforms

WORKING = """
import torch
from srv.platform.interface import Check, KVBuffers, Memory
from srv.platform.streams import host_streams


class Live:
    name = "{name}"
    ops = ()
    graphs = None

    def device(self, index):
        return torch.device("cpu")

    def init_worker(self, rank):
        pass

    def memory(self, device):
        return Memory(3 << 30, 4 << 30)

    def streams(self, device):
        return host_streams()

    def staging(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def copy_pages(self, source, target, pages):
        raise RuntimeError("the doctor copies no pages")

    def kv_buffers(self, layout, pages):
        raise RuntimeError("the doctor allocates no KV pool")

    def post_load(self, model):
        pass

    def diagnose(self):
        {diagnose}
"""
CHECKS = 'return [Check("fan", True, "turns"), Check("firmware", False, "is 1.0", "Flash 1.1.")]'
BACKENDS = """
def capabilities(device):
    return frozenset({"paged_kv", "float32", "bfloat16", "prefix_cache", "chunked_prefill"})


def fits(context):
    return Requires()


FACTS = PlatformFacts(capabilities, {"one": DEVICE}, backends={
    "attention": (BackendSpec("plain", 1, fits, "nowhere:Plain", "page_token_head"),),
    "sampling": (BackendSpec("plain", 1, fits, "nowhere:Plain"),),
})


"""
CREATE = "from plugin_{name}.live import Live; return Live()"


def write_platform(folder: Path, name: str, *, create: str = CREATE, diagnose: str = CHECKS, more: str = "") -> None:
    """A platform in host memory with these function bodies."""
    source = manifest_source(name, create=create.format(name=name), more=more)
    source = source.replace("import DeviceFacts,", "import BackendSpec, Requires, DeviceFacts,").replace(
        'FACTS = PlatformFacts(lambda device: frozenset({"paged_kv"}), {"one": DEVICE})', BACKENDS
    )
    write_plugin(folder, name, source)
    (folder / f"plugin_{name}" / "live.py").write_text(WORKING.format(name=name, diagnose=diagnose))


def write_distribution(folder: Path, name: str, entry_points: str = "", module: str = "", version: str = "1.0") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / f"{name.replace('-', '_')}.py").write_text(module)


def doctor(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SRV_", "TORCH_DEVICE", "OMP_"))}
    return subprocess.run(
        [sys.executable, "-m", "srv", "doctor", *words],
        env={**kept, "PYTHONPATH": str(folder), "COLUMNS": "200", **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def diagnosis(folder: Path, *words: str, status: int = 0, **variables: str) -> dict[str, Any]:
    """The JSON of a run that must have this exit status."""
    process = doctor(folder, "--json", *words, **variables)
    assert process.returncode == status, process.stdout + process.stderr
    answer: dict[str, Any] = json.loads(process.stdout)
    assert answer["can_start"] is (status == 0)
    return answer


def finding(findings: list[dict[str, str]], name: str, status: str) -> dict[str, str]:
    """The only finding with this name and status."""
    (match,) = [entry for entry in findings if (entry["name"], entry["status"]) == (name, status)]
    return match


def test_a_working_platform_is_examined_from_manifest_to_computation(tmp_path: Path) -> None:
    write_platform(tmp_path, "mine")
    source = "from srv.platform.finding import Finding\n\n\ndef known(platform, variant):\n"
    source += '    yield Finding("known", "ok", f"{platform}:{variant} was here")\n    raise OSError("no more")\n'
    write_distribution(tmp_path, "almanac", "[srv.doctor]\nalmanac = almanac:known\n", source)
    answer = diagnosis(tmp_path, "--device", "mine")
    assert (answer["format"], answer["choice"]["platform"]) == (1, "mine")
    assert answer.keys() == {"format", "can_start", "versions", "environment", "plugins", "choice", "platforms"}
    assert {"srv", "contract", "python", "torch"} <= answer["versions"].keys()
    (mine,) = answer["platforms"]
    assert mine.keys() >= {
        "reason",
        "remedy",
        "code",
        "notes",
        "priority",
        "simulated",
        "model",
        "backends",
        "refusals",
    }
    assert (mine["platform"], mine["distribution"], mine["version"]) == ("mine", "srv-mine", "3.2.1")
    assert (mine["available"], mine["usable"], mine["contract"]) == (True, True, "2.1")
    assert mine["device"]["versions"] == {"driver": "1.0"}
    names = [entry["name"] for entry in mine["findings"]]
    assert names == ["start", "memory", "computation", "fan", "firmware", "known", "almanac"]
    assert finding(mine["findings"], "known", "ok")["detail"] == "mine:one was here"
    assert finding(mine["findings"], "almanac", "warning")["detail"] == "almanac:known raised OSError: no more"
    assert finding(mine["findings"], "memory", "ok")["detail"] == "3.0 of 4.0 GiB free"
    assert finding(mine["findings"], "firmware", "warning")["remedy"] == "Flash 1.1."


def test_every_platform_is_reported_and_a_broken_one_does_not_affect_others(tmp_path: Path) -> None:
    write_plugin(tmp_path, "wreck", "raise RuntimeError('half installed')")
    answer = diagnosis(tmp_path)
    platforms = {platform["platform"]: platform for platform in answer["platforms"]}
    assert {"cpu", "cuda", "rocm", "npu", "xpu"} <= platforms.keys()
    assert answer["choice"]["asked"] is None
    assert platforms[answer["choice"]["platform"]]["usable"]
    chosen = platforms["cpu"]["backends"]["prefill_attention_backend"]
    assert chosen["because"]
    assert {"native", "torch_native"} == {chosen["name"], *chosen["rejected"]}
    for platform in platforms.values():
        assert platform["available"] or (platform["reason"] and platform["remedy"] and platform["code"])
    wreck = platforms["wreck"]
    assert (wreck["usable"], wreck["code"]) == (False, "plugin_refused")
    assert "half installed" in wreck["reason"]


@pytest.mark.parametrize(
    ("create", "diagnose", "stage", "status", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", CHECKS, "start", "error", "crashed with SIGSEGV"),
        ("import time; time.sleep(600)", CHECKS, "start", "error", "no answer within 3 s"),
        ("raise RuntimeError('no such chip')", CHECKS, "start", "error", "no such chip"),
        ("return object()", CHECKS, "start", "error", "is missing or failed"),
        (CREATE, "import os; os._exit(7)", "diagnosis", "warning", "ended with status 7"),
        (CREATE, "return ['all is well']", "diagnosis", "warning", "not a srv.platform.interface.Check"),
    ],
    ids=["crash", "hang", "raise", "no-platform", "exit-in-diagnose", "garbage-in-diagnose"],
)
def test_misbehaviour_of_a_plugin_becomes_a_finding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    create: str,
    diagnose: str,
    stage: str,
    status: str,
    words: str,
) -> None:
    write_platform(tmp_path, "bad", create=create, diagnose=diagnose)
    monkeypatch.syspath_prepend(tmp_path)
    platform = find_platforms()["bad"]
    findings = examine(platform, platform.loaded.facts.profiles["one"], {}, 3 if "no answer" in words else 60)
    (fault,) = [candidate for candidate in findings if candidate.status != "ok"]
    assert (fault.name, fault.status) == (stage, status)
    assert words in fault.detail
    assert fault.remedy
    assert [entry.name for entry in findings[:-1]] == ([] if stage == "start" else ["start", "memory", "computation"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sensors", "expected"),
    [
        (
            'Readings((Reading("0", "fan", 0.5), Reading("1", "vane")))',
            [("ok", "50 % busy"), ("ok", "reports nothing")],
        ),
        ('Readings(missing="no library", remedy="Install it.")', [("warning", "not read: no library")]),
        ('Readings(missing="it has none")', [("ok", "not read: it has none")]),
        ("1 / 0", [("warning", "ZeroDivisionError")]),
    ],
    ids=["readings", "missing", "none", "raise"],
)
def test_sensors_are_read_last_and_their_absence_is_at_most_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sensors: str, expected: list[tuple[str, str]]
) -> None:
    write_platform(tmp_path, "felt", more=f"sensors=lambda device: {sensors}")
    manifest = tmp_path / "plugin_felt" / "manifest.py"
    manifest.write_text("from srv.platform.sensors import Reading, Readings\n" + manifest.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    platform = find_platforms()["felt"]
    findings = examine(platform, platform.loaded.facts.profiles["one"], {})
    assert [entry.name for entry in findings[:4]] == ["start", "memory", "computation", "fan"]
    for finding, (status, words) in zip(findings[5:], expected, strict=True):
        assert (finding.name, finding.status) == ("sensors", status)
        assert words in finding.detail


def test_statement_that_raises_becomes_a_refusal_of_its_platform(tmp_path: Path) -> None:
    write_platform(tmp_path, "bad")
    manifest = tmp_path / "plugin_bad" / "manifest.py"
    manifest.write_text(manifest.read_text().replace("    return Requires()", "    return context.chip"))
    (bad,) = diagnosis(tmp_path, "--device", "bad", status=2)["platforms"]
    assert [refusal["code"] for refusal in bad["refusals"]] == ["statement_raised"]
    assert "AttributeError" in bad["refusals"][0]["reason"]
    assert [entry["name"] for entry in bad["findings"]][:3] == ["start", "memory", "computation"]


def test_a_faulty_reply_format_is_listed_and_refused_as_by_a_launch(tmp_path: Path) -> None:
    write_platform(tmp_path, "mine")
    write_plugin(tmp_path, "acme", "FORMAT = 5", group="srv.tool_formats", attribute="FORMAT")
    answer = diagnosis(tmp_path, "--device", "mine", status=2)
    (listed,) = [plugin for plugin in answer["plugins"] if plugin["distribution"] == "srv-acme"]
    assert (listed["family"], listed["version"], listed["state"]) == ("tool format", "3.2.1", "warning")
    assert "is int, not a ToolFormat" in listed["detail"]
    (refusal,) = answer["platforms"][0]["refusals"]
    assert (refusal["code"], refusal["what"]) == ("plugin_refused", "tool_call_parser")
    assert diagnosis(tmp_path, "--device", "mine", SRV_TOOL_CALL_PARSER="qwen")["platforms"][0]["refusals"] == []


def test_unused_backends_are_reported(tmp_path: Path) -> None:
    """Those of the plugin and of a third party; neither prevents a server from starting."""
    write_platform(tmp_path, "mine")
    manifest = tmp_path / "plugin_mine" / "manifest.py"
    ours = '"grammar": (BackendSpec("automata", 1, fits, "nowhere:Automata"),),\n    "sampling"'
    manifest.write_text(manifest.read_text().replace('"sampling"', ours))
    theirs = "from srv.platform.facts import BackendSpec, Requires\n\n\ndef fits(context):\n    return Requires()\n\n\n"
    theirs += 'SPEC = BackendSpec("spread", 1, fits, "nowhere:Spread")\n'
    write_plugin(tmp_path, "spread", theirs, group="srv.backends.grammar", entry="mine.spread", attribute="SPEC")
    (mine,) = diagnosis(tmp_path, "--device", "mine")["platforms"]
    actual = finding(mine["findings"], "backends", "warning")
    unused = "not used by this version of srv: grammar backend automata, grammar backend spread"
    assert actual["detail"] == unused
    assert actual["remedy"] == "No action is needed: srv selects backends for attention, sampling, moe only."
    assert mine["usable"]


@pytest.mark.slow
def test_wheel_that_breaks_the_import_of_torch_is_named_with_remedies(tmp_path: Path) -> None:
    write_distribution(
        tmp_path,
        "vendor-torch",
        "[torch.backends]\nvendor = vendor_torch:autoload\n",
        "def autoload():\n    raise OSError('libvendor.so: cannot open shared object file')\n",
    )
    answer = diagnosis(tmp_path, "--device", "cpu", status=0)
    fault = finding(answer["environment"], "torch", "warning")
    assert "torch loads vendor-torch automatically (entry-point group torch.backends)" in fault["detail"]
    assert "Set TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall vendor-torch" in fault["remedy"]
    assert "with TORCH_DEVICE_BACKEND_AUTOLOAD=0" in finding(answer["environment"], "torch", "ok")["detail"]
    assert finding(answer["platforms"][0]["findings"], "start", "ok")  # workers start with autoload off
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    (fixed,) = environment.torch_import(variables)
    assert fixed.status == "ok"


def test_an_unknown_device_is_refused_with_the_installed_ones() -> None:
    answer = diagnosis(Path("/nonexistent"), "--device", "cpuu", status=2)
    assert answer["platforms"] == []
    assert "Did you mean cpu?" in answer["choice"]["remedy"]


@pytest.mark.slow
def test_text_has_the_verdict_with_reasons_and_remedies(tmp_path: Path) -> None:
    write_platform(tmp_path, "bad", create="raise RuntimeError('no such chip')")
    process = doctor(tmp_path, "--device", "bad", "--model-path", str(tmp_path / "nothing.gguf"))
    assert process.returncode == 2
    text = " ".join(process.stdout.split())
    assert "no such chip" in text
    assert "report this to srv-bad" in text
    assert "[not_found]" in text
    assert "no server can start here" in text
    assert "Traceback" not in process.stdout + process.stderr


def test_a_missing_or_old_requirement_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "demanding", version="2.0")
    metadata = tmp_path / "demanding-2.0.dist-info" / "METADATA"
    metadata.write_text(
        metadata.read_text()
        + "Requires-Dist: no-such-package>=1\nRequires-Dist: torch>=99\nRequires-Dist: other; extra == 'dev'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    missing, old = environment.requirements("demanding")
    assert (missing.status, missing.detail) == ("error", "no-such-package is not installed")
    assert old.status == "warning"
    assert "demanding requires >=99" in old.detail


def test_kernels_without_their_library_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("srv.platform.environment.importlib.util.find_spec", lambda name: spec)
    (check,) = environment.kernels()
    assert check.status == "warning"
    (tmp_path / "some" / "native").mkdir(parents=True)
    (tmp_path / "some" / "native" / "lib.so").touch()
    (check,) = environment.kernels()
    assert check.status == "ok"


@every(
    ("text", "processors", "status", "words"),
    [
        ("two", 8, "warning", "is not a number of threads"),
        ("0", 8, "warning", "is not a number of threads"),
        ("64", 8, "warning", "more than the 8 processors"),
        ("1", 8, "warning", "leaves 7 of 8 processors unused"),
        ("4", 8, "ok", "'4'"),
    ],
)
def test_odd_thread_counts_are_reported(text: str, processors: int, status: str, words: str) -> None:
    (check,) = environment.threads({"OMP_NUM_THREADS": text}, processors)
    assert check.status == status
    assert words in check.detail


def test_second_torch_is_reported(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "torch").mkdir(parents=True)
        (tmp_path / name / "torch" / "__init__.py").touch()
    (check,) = environment.torch_builds([str(tmp_path / "one"), str(tmp_path / "two")])
    assert check.status == "warning"
    assert str(tmp_path / "two" / "torch") in check.detail


def test_torch_that_hides_the_installed_one_is_reported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '1.0.0'\n")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (check,) = environment.torch_import(variables)
    assert check == Finding("torch", "warning", check.detail, check.remedy)
    assert "import torch loads 1.0.0, but torch 2." in check.detail


def test_a_torch_that_cannot_be_imported_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libc10.so is gone')\n")
    (check,) = environment.torch_import({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert check.status == "error"
    assert "libc10.so is gone" in check.detail

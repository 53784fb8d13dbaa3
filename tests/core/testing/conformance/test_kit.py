"""The conformance kit itself: report, catalogue, checks that hang or crash, command line and pytest plugin.

`test_broken_plugins` tests that it finds faults of plugins, `test_platforms` runs it on whole platforms.
"""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from srv.cli.main import main
from srv.errors import Refusal
from srv.platform.interface import AttentionLayer
from srv.testing.conformance import Level, Outcome, Report, run
from srv.testing.conformance import sampler as sampler_checks
from srv.testing.conformance.bench import difference, reference
from srv.testing.conformance.catalogue import CHECKS, markdown
from srv.testing.conformance.model import Check, builds_on, is_blocked, read_report, select
from srv.testing.conformance.runner import run_checks

DOCS = Path(__file__).resolve().parents[4] / "docs" / "conformance.md"
GUIDE = DOCS.with_name("plugin-authors.md")
BY_NAME = {check.name: check for check in CHECKS}
FAULTY = """
import dataclasses, os, time
from srv_toy_device.manifest import MANIFEST as TOY

def create(context):
    from srv_toy_device.device import install
    from srv_toy_device.platform import ToyPlatform

    class Faulty(ToyPlatform):
        name = property(lambda self: "faulty")

        def diagnose(self):
            {diagnose}

    return Faulty(install())

MANIFEST = dataclasses.replace(TOY, name="faulty", create=create)
"""


def install(folder: Path, diagnose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the toy's plugin as platform `faulty`, with another diagnosis."""
    (folder / "faulty_plugin.py").write_text(FAULTY.format(diagnose=diagnose))
    info = folder / "faulty_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[srv.platforms]\nfaulty = faulty_plugin:MANIFEST\n")
    monkeypatch.syspath_prepend(str(folder))


def statuses(report: Report) -> dict[str, str]:
    return {outcome.check: outcome.status for outcome in report.outcomes}


# ---- the report ----------------------------------------------------------------------------------------


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    outcomes = (
        Outcome("a.b", Level.L0, "passed", "fine", seconds=0.25),
        Outcome("c.d", Level.L2, "failed", 'off by "one"\nand more', "Count again."),
    )
    report = Report(Level.L2, outcomes, {"srv": "1"}, {"platform": "x", "count": 2}, "2026-01-02", "srv conformance")
    report.write(tmp_path / "out.jsonl")
    assert read_report(tmp_path / "out.jsonl") == report
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_a_file_of_another_kind_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"kind": "evidence"}\n')
    with pytest.raises(ValueError, match="is no conformance report"):
        read_report(tmp_path / "other.jsonl")


def test_a_report_counts_what_failed_and_not_what_was_skipped() -> None:
    skipped = Outcome("a.b", Level.L1, "skipped", "not declared")
    failed = Outcome("c.d", Level.L1, "failed", "wrong")
    assert Report(Level.L1, (skipped,)).passed
    assert Report(Level.L1, (skipped, failed)).failures == (failed,)
    assert Report(Level.L1, (skipped, failed)).outcome("a.b") is skipped


def test_the_report_says_what_it_is_of_and_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command includes the settings that a plugin reads, without which it may find another device, or none."""
    for name in [name for name in os.environ if name.startswith("SRV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SRV_TOY_MEMORY", "512 MiB")
    report = run("toy", Level.L0, only=("manifest.found", "probe"))
    arguments = "srv conformance run --device toy --level L0 --only manifest.found probe"
    assert report.command == f"SRV_TOY_MEMORY='512 MiB' {arguments}"
    assert {"srv", "srv-toy-device", "torch"} <= set(report.versions)
    assert (report.device["platform"], report.device["variant"], report.device["simulated"]) == ("toy", "toy1", True)
    assert report.date.endswith("+00:00")
    assert set(statuses(report)) == {"manifest.found", "probe.timeout", "probe.answers", "probe.device"}


UNUSED = """
import dataclasses
from srv.platform.facts import BackendSpec, Requires
from srv_toy_device.manifest import MANIFEST as TOY

def fits(seen):
    return Requires()

MORE = {{"grammar": (BackendSpec("spread", 1, fits, "srv_toy_device.manifest:MANIFEST"),)}}
FACTS = dataclasses.replace(TOY.facts, backends={{**TOY.facts.backends, **{more}}})
MANIFEST = dataclasses.replace(TOY, name="faulty", facts=FACTS)
"""


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        ("MORE", "skipped", "not used by this version of srv: grammar backend spread. Nothing runs or tests them"),
        ("{}", "passed", "this version chooses from attention, sampling, moe"),
    ],
)
def test_unused_backends_are_reported_and_are_no_fault(
    more: str, status: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "", monkeypatch)
    (tmp_path / "faulty_plugin.py").write_text(UNUSED.format(more=more))
    report = run("faulty", Level.L0, only=("manifest", "backends"))
    assert report.failures == ()
    outcome = report.outcome("backends.used")
    assert (outcome.status, outcome.message) == (status, says)


UNFIT = """
import dataclasses
from srv.platform.facts import BackendSpec, Requires, Unfit
from srv_toy_device.facts import KV_ORDER
from srv_toy_device.manifest import MANIFEST as TOY, create

TARGET = "srv_toy_device.attention:ToyPagedAttention"

def decodes(seen):
    return Requires(slots=("decode_attention_backend",))

def unfit(seen):
    return Unfit(("its kernels are for latent attention",))

MORE = (
    BackendSpec("decodes", 1, decodes, TARGET, kv_order=KV_ORDER, graphs=True),
    BackendSpec("latent", 2, unfit, TARGET, kv_order=KV_ORDER),
)
SAMPLING = (BackendSpec("large", 1, unfit, "srv_toy_device.sampling:ToySampling"),)
OWN = TOY.facts.backends
BACKENDS = {**OWN, "attention": (*OWN["attention"], *MORE), "sampling": (*OWN["sampling"], *SAMPLING)}
MANIFEST = dataclasses.replace(TOY, name="faulty", facts=dataclasses.replace(TOY.facts, backends=BACKENDS))
"""


def test_backends_that_no_check_exercises_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the report, and in the summary of the command. A backend of one role counts in that role."""
    install(tmp_path, "", monkeypatch)
    (tmp_path / "faulty_plugin.py").write_text(UNFIT)
    path = tmp_path / "out.jsonl"
    words = ["--level", "L1", "--report", str(path), "--only", "backends.exercised"]
    assert main(["conformance", "run", "--device", "faulty", *words]) == 0
    outcome = read_report(path).outcome("backends.exercised")
    missed = "its kernels are for latent attention"
    assert outcome.status == "skipped"
    assert f"attention backend latent: {missed}; sampling backend large: {missed}." in outcome.message
    assert "attention backend toy_paged (prefill and decode), attention backend decodes (decode)" in outcome.message
    summary = capsys.readouterr().out.partition(": 1 skipped\n")[2]
    assert summary.startswith("backends.exercised: not exercised: attention backend latent")


FEWER = """
FACTS = TOY.facts
DECLARED = lambda device: FACTS.capabilities(device) - {"chunked_prefill", "w8a8"}
MANIFEST = dataclasses.replace(MANIFEST, facts=dataclasses.replace(FACTS, capabilities=DECLARED))
"""


def test_features_that_work_undeclared_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "pass", monkeypatch)
    with (tmp_path / "faulty_plugin.py").open("a") as plugin:
        plugin.write(FEWER)
    outcome = run("faulty", Level.L2, only=("features.undeclared",)).outcome("features.undeclared")
    assert outcome.status == "undeclared", outcome.message
    assert outcome.message.startswith("the checks of chunked_prefill, w8a8 pass")


# ---- the catalogue -------------------------------------------------------------------------------------


def test_names_are_unique_and_levels_in_order() -> None:
    assert len(BY_NAME) == len(CHECKS)
    assert [check.level for check in CHECKS] == sorted(check.level for check in CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_is_there_and_builds_on_checks_before_it(check: Check) -> None:
    assert callable(pkgutil.resolve_name(f"srv.testing.conformance.{check.target}"))
    assert check.summary
    assert check.remedy.endswith(".")
    before = CHECKS[: CHECKS.index(check)]
    group = check.name.partition(".")[0]
    for name in check.after:
        assert name in (check.name, group) or any(name in (entry.name, entry.group) for entry in before), name


def test_each_level_builds_on_what_is_below_it() -> None:
    assert builds_on(BY_NAME["pool.shapes"], BY_NAME["probe.answers"])
    assert builds_on(BY_NAME["engine.abort"], BY_NAME["attention.gqa"])
    assert builds_on(BY_NAME["attention.gqa"], BY_NAME["attention.several_pages"])
    assert not builds_on(BY_NAME["attention.gqa"], BY_NAME["sampler.distribution"])
    assert not builds_on(BY_NAME["attention.gqa"], BY_NAME["attention.gqa"])


def test_checks_are_chosen_by_level_name_and_group() -> None:
    assert {check.level for check in select(CHECKS, Level.L1)} == {Level.L0, Level.L1}
    assert [check.name for check in select(CHECKS, Level.L4, ["attention.gqa"])] == ["attention.gqa"]
    assert {check.group for check in select(CHECKS, Level.L4, ["pool", "graph"])} == {"pool", "graph"}
    with pytest.raises(ValueError, match=r"there is no check attention\.gqs"):
        select(CHECKS, Level.L4, ["attention.gqs"])


def test_the_page_lists_every_check() -> None:
    assert markdown().strip() in DOCS.read_text(), (
        "docs/conformance.md: insert the output of `srv conformance list --markdown`"
    )


def test_the_guide_counts_every_check() -> None:
    """The numbers of its sample run; tests/e2e/test_plugin_new.py compares how many of them a new plugin passes."""
    (counts,) = re.findall(r": (\d+) passed, (\d+) skipped$", GUIDE.read_text(), re.MULTILINE)
    assert sum(map(int, counts)) == len(select(CHECKS, Level.L3)), "docs/plugin-authors.md: update the sample run"


# ---- runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "toy"])
def test_built_in_platforms_pass_the_static_checks(device: str) -> None:
    report = run(device, Level.L0)
    assert report.failures == ()
    assert len(report.of("passed")) == len(report.outcomes) > 10


def test_the_toy_passes_the_checks_of_devices() -> None:
    report = run("toy", Level.L1, only=("platform", "pool.shapes", "sampler"))
    assert report.failures == ()
    assert len(report.of("passed")) > 10


def test_a_hanging_check_fails_and_the_next_ones_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "time.sleep(600)", monkeypatch)
    names = ("platform.starts", "platform.diagnose", "sampler.placement")
    checks = [dataclasses.replace(BY_NAME[name], seconds=200.0) for name in names]
    checks[1] = dataclasses.replace(checks[1], seconds=2.0)
    report = run_checks("faulty", Level.L1, checks)
    assert statuses(report) == {names[0]: "passed", names[1]: "failed", names[2]: "passed"}
    assert "did not end within 2 s" in report.outcome("platform.diagnose").message
    assert report.outcome("platform.diagnose").remedy == BY_NAME["platform.diagnose"].remedy


def test_a_crashing_check_fails_and_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "os.kill(os.getpid(), 11)", monkeypatch)
    report = run("faulty", Level.L1, only=("platform.diagnose", "platform.memory", "sampler.placement"))
    assert statuses(report) == {
        "platform.memory": "passed",
        "platform.diagnose": "failed",
        "sampler.placement": "passed",
    }
    assert "SIGSEGV" in report.outcome("platform.diagnose").message


def test_a_check_after_one_that_failed_is_skipped_or_says_that_it_may_be_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "raise ArithmeticError('no such sum')", monkeypatch)
    first = BY_NAME["platform.diagnose"]
    after = [dataclasses.replace(BY_NAME[name], after=(first.name,)) for name in ("platform.memory", "platform.events")]
    after[1] = dataclasses.replace(after[1], seconds=0.0)
    report = run_checks("faulty", Level.L1, [dataclasses.replace(first, blocks=False), *after])
    assert statuses(report) == {first.name: "failed", "platform.memory": "passed", "platform.events": "failed"}
    message = report.outcome("platform.events").message
    assert message.startswith("platform.diagnose failed, which may be the cause: it did not end within 0 s")
    report = run_checks("faulty", Level.L1, [first, *after])
    assert statuses(report) == {first.name: "failed", "platform.memory": "skipped", "platform.events": "skipped"}
    assert report.outcome("platform.events").message == "platform.diagnose failed, and this check depends on it"


def test_a_fault_of_one_feature_of_attention_hides_no_other_feature() -> None:
    def blocked(name: str) -> set[str]:
        return {check.name for check in CHECKS if check.level is Level.L2 and is_blocked(check, BY_NAME[name])}

    basic = ("placement", "inputs", "single_page", "several_pages", "writes")
    features = [check.name for check in CHECKS if check.group == "attention" and check.name[10:] not in basic]
    assert {name: blocked(name) for name in features} == {name: set() for name in features}
    assert {"attention.window", "graph.replay"} <= blocked("attention.several_pages")
    assert is_blocked(BY_NAME["engine.greedy"], BY_NAME["attention.page_boundaries"])


def test_an_error_of_the_plugin_is_reported_with_its_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "raise ArithmeticError('no such sum')", monkeypatch)
    outcome = run("faulty", Level.L1, only=("platform.diagnose",)).outcome("platform.diagnose")
    assert outcome.status == "failed"
    assert "ArithmeticError: no such sum (faulty_plugin.py:" in outcome.message


def test_a_child_ends_with_the_run_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "hanging"
    install(tmp_path, f"open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)", monkeypatch)
    line = ["-m", "srv", "conformance", "run", "--device", "faulty", "--level", "L1", "--only", "platform.diagnose"]
    running = subprocess.Popen([sys.executable, *line], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        assert holds_within(120, lambda: marker.exists() and marker.read_text() != "")
    finally:
        running.kill()
        running.wait()
    child = int(marker.read_text())
    assert holds_within(
        30, lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    )


def test_an_interrupted_run_leaves_a_report_of_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, path = tmp_path / "hanging", tmp_path / "out.jsonl"
    install(tmp_path, f"open({str(marker)!r}, 'w').write('here'); time.sleep(600)", monkeypatch)
    names = ["manifest.found", "platform.starts", "platform.diagnose", "sampler.placement"]
    line = ["-m", "srv", "conformance", "run", "--device", "faulty", "--level", "L1", "--report", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # A shell starts background jobs with SIGINT ignored, and their children inherit that; not a handler.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        running = subprocess.Popen([sys.executable, *line, "--only", *names], env=environment)
    finally:
        signal.signal(signal.SIGINT, inherited)
    try:
        assert holds_within(120, lambda: marker.exists() and marker.read_text() != "")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    finally:
        running.kill()
        running.wait()
    report = read_report(path)
    assert statuses(report) == {"manifest.found": "passed", "platform.starts": "passed"}
    assert report.device["platform"] == "faulty"


def holds_within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def test_an_unknown_platform_fails_once() -> None:
    report = run("nowhere", Level.L1)
    assert [outcome.check for outcome in report.failures] == ["manifest.found"]
    assert "nowhere" in report.failures[0].message
    assert {outcome.status for outcome in report.outcomes[1:]} == {"skipped"}
    assert not report.device["available"]


def test_a_device_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(Refusal, match="bad_device"):
        run("what is this?", Level.L0)


# ---- the calculations ----------------------------------------------------------------------------------


def test_the_exact_check_of_a_sampler_tells_right_from_wrong() -> None:
    row = sampler_checks.SampledRow(sampler_checks.logits(20, 1), top_k=6)
    wanted = row.probabilities()
    noise = (np.arange(sampler_checks.NOISE_VALUES) + 0.5) / sampler_checks.NOISE_VALUES
    order = np.argsort(-wanted)
    right = order[np.searchsorted(np.cumsum(wanted[order]), noise)]
    assert sampler_checks._noise_error(right, wanted) == ""
    bent = order[np.searchsorted(np.cumsum(wanted[order]), noise**1.05)]
    assert "of the noise; its probability is" in sampler_checks._noise_error(bent, wanted)
    shuffled = np.random.default_rng(0).permutation(right)
    assert "intervals as the noise rises" in sampler_checks._noise_error(shuffled, wanted)
    assert "the filters remove it" in sampler_checks._noise_error(np.where(right == order[5], order[6], right), wanted)


def test_the_statistical_check_uses_the_chi_squared_distribution() -> None:
    # P(X >= 18.307) = 0.05 and P(X >= 23.209) = 0.01 for ten degrees of freedom, from tables.
    assert sampler_checks._chi_squared_tail(18.307, 10) == pytest.approx(0.05, rel=0.02)
    assert sampler_checks._chi_squared_tail(23.209, 10) == pytest.approx(0.01, rel=0.03)


def test_the_reference_of_attention_is_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    layer = AttentionLayer(0, 4, 2, 16, 0.25)
    wide = [part.repeat_interleave(2, 1).transpose(0, 1) for part in (k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *wide, is_causal=True).transpose(0, 1)
    got = reference(layer, q, k, v)
    assert difference(got, want, "float32") == ""
    assert difference(got + 0.01, want, "float32") != ""
    assert difference(got * float("nan"), want, "float16") != ""
    seen = reference(dataclasses.replace(layer, window=1), q, k, v)
    torch.testing.assert_close(seen, v.repeat_interleave(2, 1))


# ---- the command and the pytest plugin -----------------------------------------------------------------


def test_the_command_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.jsonl"
    status = main(
        ["conformance", "run", "--device", "toy", "--level", "L0", "--report", str(path), "--only", "manifest"]
    )
    assert status == 0
    assert read_report(path).passed
    assert "manifest.import_purity" in capsys.readouterr().out


def test_the_command_tells_a_failure_from_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "run", "--device", "nowhere", "--level", "L0", "--only", "manifest.found"]) == 1
    assert "FAILED" in capsys.readouterr().out
    absent = ["conformance", "run", "--device", "rocm", "--level", "L1", "--only", "manifest", "platform.starts"]
    assert main(absent) == 2
    assert "only L0 could be checked on this machine" in capsys.readouterr().err


def test_a_misspelt_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "run", "--device", "toy", "--only", "manifets"]) == 2
    assert "there is no check manifets" in capsys.readouterr().err


def pytest_run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest as a plugin's author runs it, away from this repository."""
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "srv.testing.conformance.pytest_plugin",
        "--pyargs",
        "srv.testing",
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [*line, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_checks_run_as_tests(tmp_path: Path) -> None:
    process = pytest_run("--srv-device", "toy", "--srv-level", "L0", "--srv-report", "out.jsonl", folder=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    report = read_report(tmp_path / "out.jsonl")
    assert f"{len(report.outcomes)} passed" in process.stdout


def test_without_a_device_the_tests_skip_and_say_why(tmp_path: Path) -> None:
    process = pytest_run(folder=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "give --srv-device NAME" in process.stdout

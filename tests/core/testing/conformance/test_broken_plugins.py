"""The conformance kit on plugins that are broken on purpose: each is caught by exactly one check.

Every module of `broken/` except the `toy_*` and `cpu_*` ones is a platform plugin: that of the toy device, or that of
the CPU for faults of several ranks, with one fault. Its docstring describes the fault, and the last line names the
check that catches it. It is installed like a vendor's package, as a `.dist-info` with an entry point in a folder of
the import path, and the kit runs in a separate process.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from srv.platform.manifest import AUTOLOAD
from srv.testing.conformance import Level, Outcome, Report
from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.catalogue_reference import GRAPHS
from srv.testing.conformance.model import read_report
from srv.testing.conformance.processes import CHILD, Template
from srv.testing.conformance.runner import MAY_BE_THE_CAUSE, modules_of_checks

BROKEN = Path(__file__).parent / "broken"
CAUGHT = re.compile(r'^Caught by (?P<check>[a-z_.0-9]+) at (?P<level>L\d), naming "(?P<named>.+)"\.$', re.MULTILINE)
HELPERS = ("toy_", "cpu_")  # how the names of modules begin that are not plugins
CONTROLS = ("unbroken", "refuses_odd_sizes")
# The checks above L0 that run on a plugin that is made from the CPU's: those that start ranks, and what they depend on.
RANKS = ("platform", "graph.communicator", "engine.greedy", "engine.ranks")
PATIENCE_S = 280.0

# Checks that no plugin here makes fail as the only failure, with the reason.
ONLY_CORE = "core does it with results that earlier checks verify; faults of a plugin fail those checks"
EXEMPT = {
    "manifest.found": "it checks what is installed, not a plugin; test_kit.py has a case in which it fails",
    "backends.used": "it reports backends that nothing uses, and never fails",
    "backends.exercised": "it names backends that no check exercises, and never fails",
    "op.others": "every op with a contract has its own check; one without a contract fails op.coverage",
    "op.experts_fp8": "its cases are made as those of op.experts and op.linear_fp8, which catch faults of both",
    "op.experts_gguf": "its cases are made as those of op.experts and op.linear_gguf, which catch faults of both",
    "graph.latent": "the example device, which faulty plugins are made of, has no latent attention",
    "attention.latent": "the example device, which faulty plugins are made of, has no latent attention",
    "features.undeclared": "it reports undeclared features that work, and never fails",
    "attention.undeclared": "it reports undeclared features that work, and never fails",
    "copies.ring": "core reuses the memory; faults of staging and streams fail copies.staging and copies.streams",
    "engine.float32": "if float32 is declared, all other checks use it, so this one is skipped",
    "engine.sampling": "core generates the noise, and L1 checks that a sampler chooses the one right token for it",
    "engine.penalised": ONLY_CORE,
    "engine.stop": ONLY_CORE,
    "engine.abort": ONLY_CORE,
    "engine.late_inputs": ONLY_CORE,
    "engine.drafts": "its rows have several query tokens, like chunks of prompts, which the attention checks cover",
    "engine.pieces": ONLY_CORE,
    "engine.memory": "the sizes of pools are checked at L1, and weights and buffers are core's",
    "arguments.refused": "core refuses declared unsupported values before it calls the plugin",
    "arguments.supported": "it needs all of L3 and a server for each set of values, which takes minutes",
    "arguments.undeclared": "it reports undeclared values that work, and never fails",
}

# The kit in its own process, whose children are forked from the two processes behind the descriptors.
RUN = """
import socket, sys
from functools import partial
from srv.testing.conformance import Level, run
from srv.testing.conformance.processes import fork
device, level, path, bare, loaded, *only = sys.argv[1:]
forks = {each: partial(fork, socket.socket(fileno=int(each))) for each in (bare, loaded)}
starts = lambda level, environment: forks[bare if level is Level.L0 else loaded]
run(device, Level[level], only=only, starts=starts).write(path)
"""


@dataclass(frozen=True)
class Fault:
    """A broken plugin, with the check that catches it and the text in its message, which the docstring gives.

    ranks: whether it is made from the CPU's plugin. asynchronous: whether the toy device runs operators when the host
    waits, without which the fault does not show.
    """

    plugin: str
    check: str
    level: Level
    named: str
    ranks: bool
    asynchronous: bool

    def checks(self) -> tuple[Level, list[str]]:
        """The level to run, and the checks: all up to L2. Above L2, where each check starts an engine, only greedy
        output and the check for the fault."""
        static = [check.name for check in CHECKS if check.level is Level.L0]
        if self.ranks:
            return self.level, [*static, *(name for name in RANKS if self.level is Level.L3 or "engine" not in name)]
        if self.level <= Level.L2:
            return Level.L2, []
        lower = [check.name for check in CHECKS if check.level <= Level.L2]
        return self.level, list(dict.fromkeys((*lower, "engine.greedy", self.check)))


def faults() -> list[Fault]:
    paths = sorted(path for path in BROKEN.glob("*.py") if not path.stem.startswith(HELPERS))
    return [_fault(path) for path in paths if path.stem not in CONTROLS]


def _fault(path: Path) -> Fault:
    source = path.read_text()
    caught = CAUGHT.search(ast.get_docstring(ast.parse(source)) or "")
    assert caught is not None, f"the docstring of broken/{path.name} does not say which check catches it"
    waits = "SRV_TOY_ASYNCHRONOUS=1" in source
    return Fault(path.stem, caught["check"], Level[caught["level"]], caught["named"], "cpu_variant" in source, waits)


FAULTS = {fault.plugin: fault for fault in faults()}
# They need no device, but several seconds: one takes the whole time limit of a probe, one sleeps in every import.
SLEEPING = [FAULTS["hangs_in_probe"], FAULTS["slow_manifest"]]
STATIC = [fault for fault in FAULTS.values() if fault.level is Level.L0 and fault not in SLEEPING]
LIVE = [*SLEEPING, *(fault for fault in FAULTS.values() if fault.level > Level.L0)]
AT_BOUNDARIES = [fault for fault in LIVE if fault.check == "attention.page_boundaries"]
WRITERS = [fault for fault in LIVE if fault.check == "attention.writes"]


def install(plugin: str, folder: Path) -> None:
    """Install a plugin as an installer does: its modules, and a `.dist-info` with an entry point."""
    for path in (BROKEN / f"{plugin}.py", *(path for name in HELPERS for path in BROKEN.glob(f"{name}*.py"))):
        shutil.copy(path, folder)
    info = folder / f"srv_{plugin}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: srv-{plugin.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[srv.platforms]\n{plugin} = {plugin}:MANIFEST\n")


class Templates(NamedTuple):
    """Processes from which all runs fork their children: without torch, and with all that checks import.

    What a worker's environment changes must not be read by torch when it is imported: the plugins here change nothing
    of the kind.
    """

    bare: Template
    loaded: Template

    def descriptors(self) -> tuple[int, int]:
        return self.bare.fileno(), self.loaded.fileno()


def conformance(plugin: str, folder: Path, environment: Mapping[str, str], templates: Templates) -> Report:
    """The kit's report of the fault's checks; of a control, of all checks up to L2."""
    install(plugin, folder)
    fault = FAULTS.get(plugin)
    level, only = fault.checks() if fault else (Level.L2, [])
    waits = {"SRV_TOY_ASYNCHRONOUS": "1"} if fault and fault.asynchronous else {}
    report = folder / "report.jsonl"
    path = [str(folder), *filter(None, [environment.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-c", RUN, plugin, level.name, str(report), *map(str, templates.descriptors()), *only],
        env={**environment, "PYTHONPATH": os.pathsep.join(path), **waits},
        pass_fds=templates.descriptors(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return read_report(report)


class Reports(dict[str, "Future[Report]"]):
    """By plugin; one that is not there is made by `submit`."""

    def __init__(self, submit: Callable[[str], Future[Report]]) -> None:
        super().__init__()
        self._submit = submit

    def __missing__(self, plugin: str) -> Future[Report]:
        self[plugin] = future = self._submit(plugin)
        return future


@pytest.fixture(scope="module")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Report]]]:
    """The reports of the selected tests; two run at a time, in a worker of xdist only when a test needs one."""
    called = [
        item.callspec
        for item in request.session.items
        if getattr(item, "module", None) is request.module and hasattr(item, "callspec")
    ]
    plugins = [call.params["fault"].plugin if "fault" in call.params else call.params["plugin"] for call in called]
    # Copied here, because pytest changes it while the threads run.
    environment = {**os.environ, AUTOLOAD: "0", "OMP_NUM_THREADS": "1"}
    templates = Templates(Template([CHILD], environment), Template(modules_of_checks(), environment))
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="conformance") as pool:
        try:

            def submit(plugin: str) -> Future[Report]:
                return pool.submit(conformance, plugin, tmp_path_factory.mktemp(plugin), environment, templates)

            futures = Reports(submit)
            if "PYTEST_XDIST_WORKER" not in environment:  # otherwise another worker runs some of the tests
                futures.update({plugin: submit(plugin) for plugin in dict.fromkeys(plugins)})
            yield futures
        finally:
            pool.shutdown(cancel_futures=True)
            for template in templates:
                template.close()


def as_text(outcomes: tuple[Outcome, ...]) -> str:
    return "\n".join(f"{outcome.check}: {outcome.status}: {outcome.message} {outcome.remedy}" for outcome in outcomes)


def assert_caught(report: Report, fault: Fault) -> None:
    causes = [candidate for candidate in report.failures if MAY_BE_THE_CAUSE not in candidate.message]
    assert [cause.check for cause in causes] == [fault.check], as_text(report.outcomes)
    assert report.failures[0] is causes[0], "what is due to it comes behind it"
    (failure,) = causes
    assert failure.level is fault.level
    assert fault.named in failure.message, failure.message
    assert failure.remedy.strip(), failure


@pytest.mark.parametrize("fault", STATIC, ids=lambda fault: fault.plugin)
def test_a_fault_that_needs_no_device_is_caught_by_name(fault: Fault, reports: Mapping[str, Future[Report]]) -> None:
    assert_caught(reports[fault.plugin].result(), fault)


@pytest.mark.proof(minutes=0.4)
@pytest.mark.parametrize("fault", LIVE, ids=lambda fault: fault.plugin)
def test_a_fault_of_the_live_platform_is_caught_by_name(fault: Fault, reports: Mapping[str, Future[Report]]) -> None:
    assert_caught(reports[fault.plugin].result(), fault)


@pytest.mark.proof(minutes=0.4)
@pytest.mark.parametrize("fault", WRITERS, ids=lambda fault: fault.plugin)
def test_attention_is_judged_although_keys_and_values_are_stored_wrongly(
    fault: Fault, reports: Mapping[str, Future[Report]]
) -> None:
    report = reports[fault.plugin].result()
    unjudged = {outcome.check for outcome in report.of("skipped") if f"{fault.check} failed" in outcome.message}
    graphs = {check.name for check in GRAPHS}
    assert graphs - {outcome.check for outcome in reports["unbroken"].result().of("skipped")} <= unjudged <= graphs
    passed = {outcome.check for outcome in report.of("passed")}
    assert {"attention.several_pages", "attention.gqa", "attention.extend", "attention.window_pages"} <= passed


@pytest.mark.proof(minutes=0.4)
@pytest.mark.parametrize("fault", AT_BOUNDARIES, ids=lambda fault: fault.plugin)
def test_a_fault_at_page_boundaries_hides_no_other(fault: Fault, reports: Mapping[str, Future[Report]]) -> None:
    report = reports[fault.plugin].result()
    assert not [outcome.check for outcome in report.of("skipped") if f"{fault.check} failed" in outcome.message]
    passed = {outcome.check for outcome in report.of("passed")}
    assert {"attention.gqa", "attention.window", "attention.layers", "attention.head_dims", "graph.replay"} <= passed


@pytest.mark.proof(minutes=0.4)
@pytest.mark.parametrize("plugin", CONTROLS)
def test_the_plugin_without_a_fault_passes(plugin: str, reports: Mapping[str, Future[Report]]) -> None:
    report = reports[plugin].result()
    assert report.passed, as_text(report.failures)
    assert {outcome.level for outcome in report.of("passed")} == {Level.L0, Level.L1, Level.L2}, as_text(
        report.outcomes
    )


def test_every_check_that_a_fault_names_is_one_of_the_kit() -> None:
    levels = {check.name: check.level for check in CHECKS}
    assert {fault.check: fault.level for fault in FAULTS.values()}.items() <= levels.items()


def test_every_check_has_a_broken_plugin_or_a_reason_why_not() -> None:
    shown = {fault.check for fault in FAULTS.values()}
    assert {check.name for check in CHECKS} - shown == set(EXEMPT)
    assert all(EXEMPT.values())

"""`srv doctor`: diagnose whether a server can start on this machine, and what to do if it cannot.

Checks the environment, lists the plugins of all families, and examines every installed platform: discovers it, probes
it, creates it in a child process, runs its own checks, and resolves the arguments with the model. Exit status 0 if a
server could start (on `--device`, or on the automatically chosen platform), else 2. Torch-free: everything that needs
torch runs in child processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

import srv
from srv.args.backends import USED_FAMILIES, unused_backends
from srv.args.statement import UserInput
from srv.cli.diagnosis import Diagnosis, ExaminedPlatform, PlatformChoice
from srv.cli.families import DOCTOR_GROUP, installed_plugins
from srv.cli.platforms import platform_dict, seconds
from srv.errors import PlatformUnavailable, PluginError, Refusal, Rejection
from srv.planning.resolution import ResolvedPlan, resolve_plan
from srv.planning.target import make_target
from srv.platform import API_VERSION, environment
from srv.platform.choose import choose, parse_device, unused_cards
from srv.platform.doctor import DEFAULT_TIMEOUT_S, examine
from srv.platform.finding import Finding
from srv.platform.host import versions
from srv.platform.installed import entries
from srv.platform.manifest import ProbeResult
from srv.platform.probe import probe_all
from srv.platform.registry import InstalledPlatform, check_requirement, find_all_backends, find_platforms

FORMAT = 1  # version of the JSON; increased by incompatible changes
_CONCURRENCY = 3  # child processes that import torch at the same time


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from srv.args.cli import PREFIX, StoreFlag

    parser = subparsers.add_parser(
        "doctor",
        help="check whether a server can start on this machine",
        description="Examine this machine: its Python environment and every installed platform, each in a child"
        " process. Exit status 0 if a server can start, else 2.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the JSON to FILE")
    parser.add_argument(
        "--device",
        dest=f"{PREFIX}device",
        action=StoreFlag,
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="examine only this platform",
    )
    parser.add_argument(
        "--model-path",
        dest=f"{PREFIX}model_path",
        action=StoreFlag,
        default=argparse.SUPPRESS,
        metavar="PATH",
        help="choose backends for this model (default: demo)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long the examination of a platform may take (default: %(default)g)",
    )
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    """Examine and print; exit status 2 if no server can start."""
    from rich.console import Console  # slow to import; other commands do not need it

    from srv.args.sources import gather
    from srv.cli.doctor_text import show

    try:
        user = gather(namespace, os.environ)
    except PluginError as error:  # arguments cannot be resolved while a hooks plugin is faulty
        diagnosis = _faulty_hooks(error)
    else:
        diagnosis = diagnose(user, namespace.timeout)
    text = json.dumps(to_dict(diagnosis), indent=2)
    if namespace.report is not None:
        _write(namespace.report, text)
    if namespace.json:
        print(text)
    else:
        show(diagnosis, Console())
    return 0 if diagnosis.can_start else 2


def _write(report: Path, text: str) -> None:
    try:
        report.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        reason = f"it cannot be written: {error.strerror or error}"
        refused = Rejection("bad_value", "report", str(report), "command line", reason, "Choose another file.")
        raise Refusal([refused]) from error


def diagnose(user: UserInput, timeout_s: float = DEFAULT_TIMEOUT_S) -> Diagnosis:
    """Examine the environment and the platforms: only that of --device, or all if `user` does not set it."""
    installed = find_platforms()
    requested = user.value("device")
    selected = _selected(requested, installed)
    probed = probe_all(selected)
    plugins = tuple(installed_plugins(frozenset(selected)))
    with ThreadPoolExecutor(_CONCURRENCY, thread_name_prefix="doctor") as pool:
        environment_findings = pool.submit(environment.findings, os.environ, timeout_s)
        examined = pool.map(lambda name: _examine(selected[name], probed[name], user, timeout_s), selected)
        platforms = dict(zip(selected, examined, strict=True))
        return Diagnosis(
            versions=_versions(),
            environment=(*environment_findings.result(), *_argument_findings(user)),
            platforms=platforms,
            choice=_choice(requested, installed, probed),
            plugins=plugins,
        )


def _versions() -> dict[str, str]:
    return {
        "srv": srv.__version__,
        "contract": _dotted(API_VERSION),
        "python": host.python_version(),
        **versions("srv-kernels", "torch"),
    }


def _faulty_hooks(error: PluginError) -> Diagnosis:
    """The diagnosis if a plugin of hooks cannot be used: no server can start, on whichever platform."""
    finding = Finding("hooks", "error", f"plugin {error.distribution}: {error.member}: {error.reason}", error.remedy)
    choice = PlatformChoice(None, None, "a plugin of hooks cannot be used", error.remedy)
    return Diagnosis(_versions(), (finding,), {}, choice, tuple(installed_plugins(frozenset())))


def _selected(requested: str | None, platforms: Mapping[str, InstalledPlatform]) -> Mapping[str, InstalledPlatform]:
    """The platforms to examine: all, or the requested one (none if its name is unknown)."""
    if requested is None:
        return {name: platforms[name] for name in platforms}
    try:
        name = parse_device(requested).name
    except Refusal:  # `_choice` reports it
        return {}
    return {name: platforms[name]} if name in platforms else {}


def _argument_findings(user: UserInput) -> list[Finding]:
    """Problems of server arguments, for example in environment variables."""
    errors = [
        Finding("arguments", "error", f"{rejection.what}: {rejection.reason}", rejection.remedy)
        for rejection in user.rejections
    ]
    return errors + [Finding("arguments", "warning", note) for note in user.notes]


def _examine(installed: InstalledPlatform, probed: ProbeResult, user: UserInput, timeout_s: float) -> ExaminedPlatform:
    findings = _unused(installed)
    if not probed.available or probed.device is None:
        return ExaminedPlatform(installed, probed, findings)
    resolved, refusals = _resolve(installed, probed, user)
    options = (
        {} if resolved is None else {name: resolved.resolved.config.get(name) for name in installed.loaded.options}
    )
    findings += examine(installed, probed.device, options, timeout_s)
    findings += tuple(_contributed(installed.name, probed.device.variant))
    return ExaminedPlatform(installed, probed, findings, resolved, refusals)


def _contributed(platform: str, variant: str) -> Iterator[Finding]:
    """What other distributions know of a device. One that fails is a warning and does not affect the others."""
    for entry in entries(DOCTOR_GROUP):
        try:
            check_requirement(entry)
            yield from entry.load()(platform, variant)
        except Exception as error:  # noqa: BLE001 - a distribution may raise anything; only its own finding is missing
            remedy = f"Update or uninstall {entry.distribution}, or report this to its maintainer."
            yield Finding(entry.name, "warning", f"{entry.value} raised {type(error).__name__}: {error}", remedy)


def _unused(installed: InstalledPlatform) -> tuple[Finding, ...]:
    """A warning about backends of the plugin, or of a third party for it, that `srv` does not use."""
    unused = (
        "" if installed.manifest is None else unused_backends(installed.manifest, find_all_backends(installed.name))
    )
    remedy = f"No action is needed: srv selects backends for {', '.join(USED_FAMILIES)} only."
    return (Finding("backends", "warning", unused, remedy),) if unused else ()


def _resolve(
    installed: InstalledPlatform, probed: ProbeResult, user: UserInput
) -> tuple[ResolvedPlan | None, tuple[Rejection, ...]]:
    """Resolve a launch on this platform, regardless of --device; returns the plan, if any, and all refusals."""
    assert probed.device is not None
    rest = UserInput(tuple(statement for statement in user.statements if statement.argument != "device"))
    try:
        target = make_target(installed.loaded, probed.device, "examined by srv doctor", probed.notes)
        plan = resolve_plan(rest, lambda text, source: target, model_needed=False)
        return plan, plan.check.refusals
    except Refusal as refusal:
        return None, refusal.rejections
    except Exception as error:  # noqa: BLE001 - a plugin's functions may raise anything; it is reported
        reason = f"a default, constraint or backend check of it raised {type(error).__name__}: {error}"
        source = f"{installed.distribution} {installed.version}".strip()
        remedy = f"Report this to the maintainer of {installed.distribution}."
        return None, (Rejection("statement_raised", f"platform {installed.name}", None, source, reason, remedy),)


def _choice(
    requested: str | None, platforms: Mapping[str, InstalledPlatform], probed: Mapping[str, ProbeResult]
) -> PlatformChoice:
    """The platform that a launch would use, according to the probes."""
    try:
        chosen = choose(requested, platforms, lambda candidates, _: {name: probed[name] for name in candidates})
    except PlatformUnavailable as error:
        return PlatformChoice(requested, None, f"{error.platform}: {error.reason}", error.remedy)
    except Refusal as refusal:
        reasons, remedies = (
            [getattr(rejection, part) for rejection in refusal.rejections] for part in ("reason", "remedy")
        )
        return PlatformChoice(requested, None, "; ".join(reasons), " ".join(remedies))
    unused = unused_cards(probed, chosen.installed.name) if requested is None else ()
    return PlatformChoice(requested, chosen.installed.name, chosen.reason, unused=unused)


def to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON-compatible values. The keys of one `format` are stable; new keys may be added."""
    return {
        "format": FORMAT,
        "can_start": diagnosis.can_start,
        "versions": dict(diagnosis.versions),
        "environment": [msgspec.to_builtins(finding) for finding in diagnosis.environment],
        "plugins": [plugin._asdict() for plugin in diagnosis.plugins],
        "choice": asdict(diagnosis.choice),
        "platforms": [_examined_dict(platform) for platform in diagnosis.platforms.values()],
    }


def _examined_dict(platform: ExaminedPlatform) -> dict[str, Any]:
    manifest = platform.installed.manifest
    model = None if platform.resolved is None else platform.resolved.model
    choices = {} if platform.resolved is None else platform.resolved.resolved.backends
    return {
        **platform_dict(platform.installed, platform.probed),
        "contract": None if manifest is None else _dotted(manifest.api),
        "usable": platform.usable,
        "findings": [msgspec.to_builtins(finding) for finding in platform.findings],
        "model": None if model is None else model.name,
        "backends": {
            slot: {
                "name": choice.spec.name,
                "distribution": choice.provider or None,
                "because": choice.reason,
                "rejected": {name: list(reasons) for name, reasons in choice.rejected},
            }
            for slot, choice in choices.items()
        },
        "refusals": [asdict(refusal) for refusal in platform.refusals],
    }


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))

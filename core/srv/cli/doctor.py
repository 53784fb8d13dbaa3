"""`srv doctor`: everything about this machine that decides whether a server can start on it, and what to do if not.

Looks at the environment, and at every platform that is installed: found, probed, brought to life in a child process,
asked for its own checks, resolved with the model. Exit status 0 if a server could start (of `--device`, or of the
automatic choice), else 2. Torch-free: what needs torch happens in children.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as host
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

import srv
from srv.args.backends import USED_FAMILIES, unused_backends
from srv.args.statement import UserInput
from srv.cli.platforms import record, seconds
from srv.cli.survey import Judged, judge, make_target
from srv.errors import PlatformUnavailable, Refusal, Rejected
from srv.platform import API_VERSION, environment
from srv.platform.choose import choose, parse_device
from srv.platform.doctor import DEFAULT_TIMEOUT_S, examine
from srv.platform.finding import Finding
from srv.platform.host import versions
from srv.platform.manifest import ProbeResult
from srv.platform.probe import probe_all
from srv.platform.registry import Found, find_all_backends, find_platforms

FORMAT = 1  # of the JSON; raised when a reader of the last one would go wrong
_AT_ONCE = 3  # children that import torch at the same time


@dataclass(frozen=True, slots=True)
class Examined:
    """One platform. `judged` is None where it is not available, or where `refusals` say what stands against it."""

    found: Found
    probed: ProbeResult
    findings: tuple[Finding, ...] = ()
    judged: Judged | None = None
    refusals: tuple[Rejected, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether software plays its devices: always, or those that its probe found now."""
        always = self.found.manifest is not None and self.found.manifest.simulated
        return always or (self.probed.device is not None and self.probed.device.simulated)

    @property
    def usable(self) -> bool:
        """Whether a server could start on it."""
        failed = any(finding.status == "error" for finding in self.findings)
        return self.probed.available and not failed and not self.refusals


@dataclass(frozen=True, slots=True)
class Choice:
    """The platform that a launch would take (None: it would refuse), why, and what to do."""

    asked: str | None
    platform: str | None
    because: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found."""

    versions: Mapping[str, str]
    environment: tuple[Finding, ...]
    platforms: Mapping[str, Examined]
    choice: Choice

    @property
    def can_start(self) -> bool:
        """Whether `srv launch`, with the same --device, could serve here."""
        chosen = self.platforms.get(self.choice.platform or "")
        return chosen is not None and chosen.usable and all(each.status != "error" for each in self.environment)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from srv.args.cli import PREFIX, Take

    parser = subparsers.add_parser(
        "doctor",
        help="say whether a server can start here, and what to do if not",
        description="Examine this machine: its Python environment and every installed platform, each in a child"
        " process. Exit status 0 if a server could start, else 2.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="also write the JSON to FILE")
    parser.add_argument(
        "--device",
        dest=f"{PREFIX}device",
        action=Take,
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="examine this platform alone",
    )
    parser.add_argument(
        "--model-path",
        dest=f"{PREFIX}model_path",
        action=Take,
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
    """Examine and print; 2 if no server could start."""
    from rich.console import Console  # other commands need not wait for it

    from srv.args.sources import gather
    from srv.cli.doctor_text import show

    found = diagnose(gather(namespace, os.environ), namespace.timeout)
    text = json.dumps(to_dict(found), indent=2)
    if namespace.report is not None:
        _write(namespace.report, text)
    if namespace.json:
        print(text)
    else:
        show(found, Console())
    return 0 if found.can_start else 2


def _write(report: Path, text: str) -> None:
    try:
        report.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        reason = f"it cannot be written: {error.strerror or error}"
        refused = Rejected("bad_value", "report", str(report), "command line", reason, "Write elsewhere.")
        raise Refusal([refused]) from error


def diagnose(user: UserInput, timeout_s: float = DEFAULT_TIMEOUT_S) -> Diagnosis:
    """Examine the environment and the platforms; those that `user` did not name in --device only if there is none."""
    found = find_platforms()
    asked = user.value("device")
    wanted = _wanted(asked, found)
    probed = probe_all(wanted)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="doctor") as pool:
        surroundings = pool.submit(environment.findings, os.environ, timeout_s)
        examined = pool.map(lambda name: _examine(wanted[name], probed[name], user, timeout_s), wanted)
        platforms = dict(zip(wanted, examined, strict=True))
        return Diagnosis(
            versions={
                "srv": srv.__version__,
                "contract": _dotted(API_VERSION),
                "python": host.python_version(),
                **versions("srv-kernels", "torch"),
            },
            environment=(*surroundings.result(), *_said(user)),
            platforms=platforms,
            choice=_choice(asked, found, probed),
        )


def _wanted(asked: str | None, found: Mapping[str, Found]) -> Mapping[str, Found]:
    """The platforms to look at: all, or the one that was asked for (none if its name is not known)."""
    if asked is None:
        return {name: found[name] for name in found}
    try:
        name = parse_device(asked).name
    except Refusal:  # told by the choice, which reads the same text
        return {}
    return {name: found[name]} if name in found else {}


def _said(user: UserInput) -> list[Finding]:
    """What is wrong with server arguments in the environment."""
    wrong = [Finding("arguments", "error", f"{each.what}: {each.reason}", each.remedy) for each in user.rejections]
    return wrong + [Finding("arguments", "warning", note) for note in user.notes]


def _examine(found: Found, probed: ProbeResult, user: UserInput, timeout_s: float) -> Examined:
    told = _unused(found)
    if not probed.available or probed.device is None:
        return Examined(found, probed, told)
    judged, refusals = _judge(found, probed, user)
    options = {} if judged is None else {name: judged.resolved.config.get(name) for name in found.loaded.options}
    told += examine(found, probed.device, options, timeout_s)
    return Examined(found, probed, told, judged, refusals)


def _unused(found: Found) -> tuple[Finding, ...]:
    """Backends that the plugin, or a third party for it, offers in vain."""
    unused = "" if found.manifest is None else unused_backends(found.manifest, find_all_backends(found.name))
    remedy = f"They do no harm: srv chooses backends for {' and '.join(USED_FAMILIES)}, and leaves others alone."
    return (Finding("backends", "warning", unused, remedy),) if unused else ()


def _judge(found: Found, probed: ProbeResult, user: UserInput) -> tuple[Judged | None, tuple[Rejected, ...]]:
    """What a launch on this platform would come to, whatever --device says; or everything that stands against it."""
    assert probed.device is not None
    rest = UserInput(tuple(each for each in user.statements if each.argument != "device"))
    try:
        target = make_target(found.loaded, probed.device, "examined by srv doctor", probed.notes)
        return judge(rest, lambda text, who: target, model_needed=False), ()
    except Refusal as refusal:
        return None, refusal.rejections
    except Exception as error:  # noqa: BLE001 - a plugin's statements may raise anything: that is what is told
        reason = f"one of its statements raised {type(error).__name__}: {error}"
        who = f"{found.distribution} {found.version}".strip()
        remedy = f"Report this to the maker of {found.distribution}."
        return None, (Rejected("statement_raised", f"platform {found.name}", None, who, reason, remedy),)


def _choice(asked: str | None, found: Mapping[str, Found], probed: Mapping[str, ProbeResult]) -> Choice:
    """What a launch would take, with what the probes have already said."""
    try:
        chosen = choose(asked, found, lambda candidates, _: {name: probed[name] for name in candidates})
    except PlatformUnavailable as error:
        return Choice(asked, None, f"{error.platform}: {error.reason}", error.remedy)
    except Refusal as refusal:
        reasons, remedies = ([getattr(each, part) for each in refusal.rejections] for part in ("reason", "remedy"))
        return Choice(asked, None, "; ".join(reasons), " ".join(remedies))
    return Choice(asked, chosen.found.name, chosen.why)


def to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON can hold it. Its keys are stable for one `format`; new ones may come."""
    return {
        "format": FORMAT,
        "can_start": diagnosis.can_start,
        "versions": dict(diagnosis.versions),
        "environment": [msgspec.to_builtins(each) for each in diagnosis.environment],
        "choice": asdict(diagnosis.choice),
        "platforms": [_platform_dict(each) for each in diagnosis.platforms.values()],
    }


def _platform_dict(each: Examined) -> dict[str, Any]:
    manifest = each.found.manifest
    model = None if each.judged is None else each.judged.model
    choices = {} if each.judged is None else each.judged.resolved.backends
    return {
        **record(each.found, each.probed),
        "contract": None if manifest is None else _dotted(manifest.api),
        "usable": each.usable,
        "findings": [msgspec.to_builtins(finding) for finding in each.findings],
        "model": None if model is None else model.name,
        "backends": {
            slot: {
                "name": choice.spec.name,
                "because": choice.why,
                "against": {name: list(reasons) for name, reasons in choice.against},
            }
            for slot, choice in choices.items()
        },
        "refusals": [asdict(refusal) for refusal in each.refusals],
    }


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))

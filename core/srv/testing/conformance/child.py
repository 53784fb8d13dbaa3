"""The child process of a run: it performs the checks that its parent names, and answers each with one line.

Started as `python -m srv.testing.conformance.child FD`. Standard input: one line of JSON with the device and the import
path, then one request per line: a check's name, or FACTS for the facts about the plugin, its device and its workers'
environment. FD: one answer per line. An exception of a check is its outcome; the parent
(`srv.testing.conformance.runner`) handles a crash or a timeout of this process.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from srv.errors import SrvError
from srv.platform.manifest import worker_environment
from srv.testing.conformance.catalogue import CHECKS
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import FACTS, Check, Fault, NotApplicable, Outcome, Status, Undeclared, to_json

_PARENT_POLL_S = 1.0


def main() -> int:
    checks = {check.name: check for check in CHECKS}
    return serve(
        lambda request, kit: describe(kit) if request == FACTS else to_json(perform(checks[request], kit)),
    )


def serve(respond: Callable[[str, Kit], dict[str, Any]]) -> int:
    """Answer every request of the process that started this one as `srv.testing.conformance.runner.Child`."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    setting = json.loads(sys.stdin.readline())
    sys.path.extend(entry for entry in setting["path"] if entry not in sys.path)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    kit = Kit(setting["device"], Path(setting["scratch"]), setting["rank"], setting["ranks"])
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        for line in sys.stdin:
            pipe.write(json.dumps(respond(line.strip(), kit)) + "\n")
            pipe.flush()
    return 0


def _exit_with_parent(parent: int) -> None:
    """End this process and its children once its parent is gone, whatever the check is doing."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def perform(check: Check, kit: Kit) -> Outcome:
    """Run one check in this process. Errors of the plugin become the outcome."""
    started = time.monotonic()
    status, message, remedy = _run_check(check, kit)
    return Outcome(check.name, check.level, status, message, remedy, round(time.monotonic() - started, 3))


def _run_check(check: Check, kit: Kit) -> tuple[Status, str, str]:
    try:
        function = pkgutil.resolve_name(f"srv.testing.conformance.{check.target}")
        return "passed", str(function(kit) or check.summary), ""
    except NotApplicable as reason:
        return "skipped", str(reason), ""
    except Undeclared as undeclared:
        return "undeclared", undeclared.message, undeclared.remedy
    except Fault as fault:
        return "failed", fault.message, fault.remedy or check.remedy
    except SrvError as error:
        return "failed", f"{type(error).__name__}: {error}", getattr(error, "remedy", "") or check.remedy
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything: that is the outcome
        return "failed", f"it raised {describe_exception(error)}", check.remedy


def describe(kit: Kit) -> dict[str, Any]:
    """The plugin, its device and its capabilities. What a fault makes unknown is empty."""
    facts: dict[str, Any] = {
        "platform": kit.name,
        "distribution": "",
        "version": "",
        "simulated": False,
        "unavailable": kit.unavailable_reason(),
        "capabilities": [],
        "device": {},
        "environment": {},
    }
    if kit.name in kit.platforms:
        installed = kit.installed
        facts |= {"distribution": installed.distribution, "version": installed.version}
        facts["simulated"] = installed.manifest is not None and installed.manifest.simulated
    if not facts["unavailable"]:
        facts["device"] = asdict(kit.device_facts)
        facts["simulated"] = facts["simulated"] or kit.device_facts.simulated
        facts["capabilities"] = sorted(kit.capabilities)
        facts["environment"] = _environment(kit)
    return facts


def _environment(kit: Kit) -> Mapping[str, str]:
    """The environment of the plugin's workers, empty if the function fails: manifest.worker_env reports that."""
    try:
        return worker_environment(kit.manifest, kit.device_facts)
    except Exception as error:  # noqa: BLE001 - see above
        sys.stderr.write(f"worker_env raised {describe_exception(error)}\n")
        return {}


def describe_exception(error: BaseException) -> str:
    """Its type, its message and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip()
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


if __name__ == "__main__":
    sys.exit(main())

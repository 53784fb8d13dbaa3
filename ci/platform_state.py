"""Used by `ci/platform.sh`: what must be installed for a platform, and whether it can be tested on this machine.

python ci/platform_state.py install NAME         prints the missing arguments of `pip install`, one per line
python ci/platform_state.py verdict DOCTOR.json  prints "hardware", "simulated" or the reason; status 0, 1 or 3
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FAILED, MISSING = 1, 3
# Codes of faults of a plugin; with any other code, the plugin reports that its hardware cannot be used.
PLUGIN_FAULTS = frozenset(
    {
        "plugin_refused",
        "probe_crashed",
        "probe_timeout",
        "probe_raised",
        "probe_garbage",
        "manifest_impure",
        "manifest_timeout",
    }
)


def to_install(name: str, root: Path = ROOT) -> list[str]:
    """Arguments of `pip install` that install a platform: the extra with its name, and its plugin in this checkout.

    The extra "test" has what the evidence tests import. If SRV_<NAME>_SIMULATOR is set, they install the simulator
    instead of the platform's extra, which has the vendor's SDK.
    """
    project = _toml(root / "pyproject.toml")["project"]
    simulator = root / "plugins" / f"{name}_simulator"
    simulated = bool(os.environ.get(f"SRV_{name.upper()}_SIMULATOR")) and simulator.is_dir()
    extras = [
        extra
        for extra in (*(() if simulated else (name,)), "test")
        if not all(
            _installed(Requirement(requirement))
            for requirement in project.get("optional-dependencies", {}).get(extra, [])
        )
    ]
    arguments = ["-e", f"{root}[{','.join(extras)}]"] if extras else []
    if simulated:
        distribution = _toml(simulator / "pyproject.toml")["project"]["name"]
        return arguments + ([] if _installed(Requirement(distribution)) else ["-e", str(simulator)])
    if name not in {entry_point.name for entry_point in importlib.metadata.entry_points(group="srv.platforms")}:
        for file in sorted(root.glob("plugins/*/pyproject.toml")):
            if name in _toml(file)["project"].get("entry-points", {}).get("srv.platforms", {}):
                arguments += ["-e", str(file.parent)]
    return arguments


def _toml(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _installed(requirement: Requirement) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def verdict(report: dict[str, Any]) -> tuple[int, str]:
    """The exit status and a message, from the JSON of `srv doctor --device NAME`."""
    choice = report["choice"]["asked"]
    if not report["platforms"]:
        return FAILED, f"{choice} cannot be tested: {report['choice']['because']}. {report['choice']['remedy']}"
    (platform,) = report["platforms"]
    if not platform["available"]:
        text = f"{platform['reason']}. {platform['remedy']} [{platform['code']}]"
        if platform["code"] in PLUGIN_FAULTS:
            return FAILED, f"the plugin of {choice} is at fault: {text}"
        return MISSING, f"{choice} is missing; nothing is tested and no evidence is added: {text}"
    if report["choice"]["platform"] is None:  # the device has another variant
        return (
            MISSING,
            f"{choice} is missing; nothing is tested and no evidence is added: {report['choice']['because']}",
        )
    if not report["can_start"]:
        return FAILED, f"{choice} exists, but no server can start on it: see the lines above"
    return 0, "simulated" if platform["simulated"] else "hardware"


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["install", name]:
            print("\n".join(to_install(name)), end="\n" if to_install(name) else "")
            return 0
        case ["verdict", file]:
            status, line = verdict(json.loads(Path(file).read_text(encoding="utf-8")))
            print(line)
            return status
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

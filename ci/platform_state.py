"""What `ci/platform.sh` must know of a platform: what is to be installed for it, and whether it can be tested here.

python ci/platform_state.py install NAME         prints words for pip, a line each; none if nothing is missing
python ci/platform_state.py verdict DOCTOR.json  prints "hardware", "simulated" or why not; status 0, 1 or 3
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
FAILED, NOT_HERE = 1, 3
# Codes by which `srv` says that a plugin is at fault; any other refusal of a probe is the plugin's word on the machine.
PLUGIN_FAULTS = frozenset(
    {"plugin_refused", "probe_crashed", "probe_timeout", "probe_raised", "probe_garbage", "manifest_impure"}
)


def to_install(name: str, root: Path = ROOT) -> list[str]:
    """Words for `pip install` that bring a platform here: the extra of its name, and its plugin in this tree.

    Where SRV_<NAME>_SIMULATOR is set, the simulator takes the place of the extra, which would bring the vendor's SDK.
    """
    project = _toml(root / "pyproject.toml")["project"]
    words: list[str] = []
    simulator = root / "plugins" / f"{name}_simulator"
    if os.environ.get(f"SRV_{name.upper()}_SIMULATOR") and simulator.is_dir():
        distribution = _toml(simulator / "pyproject.toml")["project"]["name"]
        return [] if _installed(Requirement(distribution)) else ["-e", str(simulator)]
    wanted = project.get("optional-dependencies", {}).get(name, [])
    if any(not _installed(Requirement(each)) for each in wanted):
        words += ["-e", f"{root}[{name}]"]
    if name not in {each.name for each in importlib.metadata.entry_points(group="srv.platforms")}:
        for file in sorted(root.glob("plugins/*/pyproject.toml")):
            if name in _toml(file)["project"].get("entry-points", {}).get("srv.platforms", {}):
                words += ["-e", str(file.parent)]
    return words


def _toml(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _installed(wanted: Requirement) -> bool:
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        return wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def verdict(told: dict[str, Any]) -> tuple[int, str]:
    """Exit status and a line, from the JSON of `srv doctor --device NAME`."""
    asked = told["choice"]["asked"]
    if not told["platforms"]:
        return FAILED, f"{asked} cannot be tested: {told['choice']['because']}. {told['choice']['remedy']}"
    (platform,) = told["platforms"]
    if not platform["available"]:
        text = f"{platform['reason']}. {platform['remedy']} [{platform['code']}]"
        if platform["code"] in PLUGIN_FAULTS:
            return FAILED, f"the plugin of {asked} is at fault: {text}"
        return NOT_HERE, f"{asked} is not here, nothing is tested and no evidence is added: {text}"
    if told["choice"]["platform"] is None:  # the platform is here, of another variant than was asked for
        return NOT_HERE, f"{asked} is not here, nothing is tested and no evidence is added: {told['choice']['because']}"
    if not told["can_start"]:
        return FAILED, f"{asked} is here, but no server can start on it: see the lines above"
    return 0, "simulated" if platform["simulated"] else "hardware"


def main(words: Sequence[str]) -> int:
    match list(words):
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

"""What the machine has: device, driver, versions, tools; and which attention backends are passed over, with reasons.

    python environment.py --device cuda --out FOLDER

Writes FOLDER/doctor.json (of `srv doctor`) and FOLDER/environment.json. Ends with status 1 if no server can start on
the device. The last line on standard output is the summary.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# What prints the driver's version, by platform.
_DRIVERS = {
    "cuda": ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"],
    "rocm": ["rocm-smi", "--showdriverversion", "--showproductname"],
    "xpu": ["xpu-smi", "discovery"],
}
_FACTS = ("nvcc", "ninja", "g++", "git")
SECONDS = 20.0


def driver(device: str) -> str:
    """What the vendor's tool says of device and driver, or that it is missing."""
    command = _DRIVERS[device]
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {SECONDS:g} s"
    return " ".join((process.stdout or process.stderr).split())


def passed_over(doctor: Mapping[str, Any]) -> dict[str, str]:
    """Attention backends that are not used on this machine, by name, with the reasons of `srv doctor`.

    A backend that fits and is only of lower priority is not among them.
    """
    if not doctor["platforms"]:
        return {}
    choice = doctor["platforms"][0]["backends"].get("decode_attention_backend", {})
    return {
        name: "; ".join(reasons)
        for name, reasons in choice.get("rejected", {}).items()
        if not any(reason.startswith("fits") for reason in reasons)
    }


def _git(*arguments: str) -> str:
    try:
        process = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)
    except OSError:
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(_DRIVERS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args(arguments)
    report, written = options.out / "doctor.json", options.out / "environment.json"
    for file in (report, written):
        file.unlink(missing_ok=True)
    doctor_command = [sys.executable, "-P", "-m", "srv", "doctor", "--device", options.device, "--report", str(report)]
    subprocess.run(doctor_command, check=False)
    if not report.exists():
        print("srv doctor wrote no report: see the log")
        return 1
    doctor = json.loads(report.read_text(encoding="utf-8"))
    commit = _git("rev-parse", "HEAD")
    device = doctor["platforms"][0]["device"] if doctor["platforms"] else None
    facts = {
        "device": device,
        "driver": "simulated" if options.simulated else driver(options.device),
        "host": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "commit": commit,
        "clean": bool(commit) and _git("status", "--porcelain") == "",
        "tools": {tool: shutil.which(tool) for tool in _FACTS},
        "passed_over": passed_over(doctor),
    }
    written.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=1))
    if device is None or not doctor["can_start"]:
        print(f"no server can start on {options.device}: {doctor['choice']['because']}")
        return 1
    print(f"{device['name']} ({device['variant']}), torch {device['versions'].get('torch', 'unknown')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`srv platforms`: list all installed platforms, and what they find on this machine.

A faulty plugin is shown as a row of the table like any other. Exit status 0.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from srv.platform.facts import DeviceFacts
from srv.platform.manifest import DEFAULT_TIMEOUT_S, ProbeResult
from srv.platform.probe import probe_all
from srv.platform.registry import InstalledPlatform, find_platforms

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_COLUMNS = ("platform", "from", "available", "variant", "devices")
_WORDS = "devices"  # the only column that may be wrapped: the others have names and codes


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "platforms",
        help="list installed platforms and what they find on this machine",
        description="List all installed platforms: where they come from, and what they find on this machine.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long a probe may take (default: %(default)g)",
    )
    parser.set_defaults(handler=run)


def run(namespace: argparse.Namespace) -> int:
    """Probe all platforms in parallel and print the results."""
    from rich.console import Console  # here and below: slow to import, and other commands do not need it

    platforms = find_platforms()
    results = probe_all(platforms, namespace.timeout)
    console = Console()
    if namespace.json:
        rows = [platform_dict(platforms[name], results[name]) for name in platforms]
        console.out(json.dumps(rows, indent=2), highlight=False)
    else:
        console.print(table(platforms, results))
        console.print(remarks(results))
    return 0


def platform_dict(installed: InstalledPlatform, result: ProbeResult) -> dict[str, Any]:
    """One platform as JSON-compatible values."""
    return {
        "platform": installed.name,
        "distribution": installed.distribution,
        "version": installed.version,
        "simulated": _simulated(installed, result),
        "priority": None if installed.manifest is None else installed.manifest.priority,
        "available": result.available,
        "code": result.code,
        "reason": result.reason,
        "remedy": result.remedy,
        "device": None if result.device is None else _device(result.device),
        "notes": list(result.notes),
        "present": list(result.present),
    }


def table(platforms: Mapping[str, InstalledPlatform], results: Mapping[str, ProbeResult]) -> Table:
    """A table with one row per platform."""
    from rich import box
    from rich.table import Table

    grid = Table(title="Platforms", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in _COLUMNS:
        grid.add_column(heading, overflow="fold", no_wrap=heading != _WORDS)
    for name, platform in platforms.items():
        grid.add_row(*_row(platform, results[name]))
    if not platforms:
        grid.caption = "none is installed: `pip install srv` installs the built-in ones"
    return grid


def remarks(results: Mapping[str, ProbeResult]) -> Table:
    """Why platforms are not available on this machine, with remedies, and the notes of probes."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, result in results.items():
        lines = [Text(note, style="yellow") for note in result.notes]
        if not result.available:
            lines.insert(0, Text(result.reason).append(f"\n{result.remedy}", style="dim"))
        for line in lines:
            grid.add_row(Text(name, style="bold"), line)
    return grid


def _row(installed: InstalledPlatform, result: ProbeResult) -> tuple[Text | str, ...]:
    from rich.text import Text

    mark = " (simulated)" if _simulated(installed, result) else ""
    name = Text(installed.name, style="bold").append(mark, style="magenta")
    verdict = Text("yes", style="green") if result.available else Text(f"no:\n{result.code}", style="red")
    device = result.device
    if device is None:
        return name, f"{installed.distribution}\n{installed.version}".strip(), verdict, "", ""
    described = f"{device.count} x {device.name or device.variant}, {device.memory_bytes / 2**30:.1f} GiB"
    return name, f"{installed.distribution}\n{installed.version}".strip(), verdict, device.variant, described


def _simulated(installed: InstalledPlatform, result: ProbeResult) -> bool:
    """Whether the platform's devices are simulated: always, or those that its probe has found."""
    always = installed.manifest is not None and installed.manifest.simulated
    return always or (result.device is not None and result.device.simulated)


def _device(device: DeviceFacts) -> dict[str, Any]:
    return {
        "variant": device.variant,
        "name": device.name,
        "count": device.count,
        "memory_bytes": device.memory_bytes,
        "versions": dict(device.versions),
        "features": list(device.features),
        "simulated": device.simulated,
    }


def seconds(text: str) -> float:
    """Parse the seconds of a `--timeout`; raises argparse's error for an invalid value."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and 600")
    return value

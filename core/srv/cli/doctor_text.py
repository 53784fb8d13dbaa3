"""The text output of `srv doctor`: sections of lines, each with its verdict and, below it, a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from srv.cli.families import absent_families

if TYPE_CHECKING:
    from rich.console import Console

    from srv.cli.diagnosis import Diagnosis, ExaminedPlatform
    from srv.cli.families import Plugin
    from srv.platform.finding import Finding

# verdict, name of the check, details, remedy
Row = tuple[str, str, str, str]
_STYLES = {"ok": "green", "no": "magenta", "warning": "yellow", "error": "red"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print all findings."""
    versions = ", ".join(f"{name} {version}" for name, version in diagnosis.versions.items())
    _section(console, "Environment", [("", "versions", versions, ""), *_rows(diagnosis.environment)])
    _section(console, "Plugins", [*map(_plugin, diagnosis.plugins), ("", "none", ", ".join(absent_families()), "")])
    for platform in diagnosis.platforms.values():
        simulated = " (simulated)" if platform.simulated else ""
        _section(console, f"Platform {platform.installed.name}{simulated}", _platform(platform))
    _section(console, "Choice", list(_choice(diagnosis)))


def _section(console: Console, title: str, rows: Iterable[Row]) -> None:
    console.print(Text(title, style="bold"))
    grid = Table.grid(padding=(0, 2), pad_edge=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for verdict, name, detail, remedy in rows:
        text = Text(detail)
        if remedy:
            text.append(f"\n{remedy}", style="dim")
        grid.add_row(Text(verdict, style=_STYLES.get(verdict, "")), name, text)
    console.print(grid)
    console.print()


def _rows(findings: Iterable[Finding]) -> list[Row]:
    return [(finding.status, finding.name, finding.detail, finding.remedy) for finding in findings]


def _plugin(plugin: Plugin) -> Row:
    detail = f"{plugin.distribution} {plugin.version}".strip() + (f": {plugin.detail}" if plugin.detail else "")
    shown = "" if plugin.state == "not examined" else plugin.state
    return shown, f"{plugin.family or plugin.group} {plugin.name}", detail, plugin.remedy


def _platform(platform: ExaminedPlatform) -> Iterator[Row]:
    installed, probed = platform.installed, platform.probed
    origin = f"{installed.distribution} {installed.version}".strip()
    contract = (
        ""
        if installed.manifest is None
        else f", written for contract version {'.'.join(map(str, installed.loaded.api))}"
    )
    yield "error" if installed.manifest is None else "ok", "found", origin + contract, ""
    if probed.available:
        yield "ok", "probe", "available", ""
    else:
        verdict = "error" if installed.manifest is None else "warning" if probed.present else "no"
        yield verdict, "probe", f"{probed.reason} [{probed.code}]", probed.remedy
    if (device := probed.device) is not None:
        memory = f"{device.memory_bytes / 2**30:.1f} GiB"
        yield "", "device", f"{device.count} x {device.name or device.variant}, {device.variant}, {memory}", ""
        if device.versions:
            yield "", "versions", ", ".join(f"{name} {version}" for name, version in device.versions.items()), ""
    yield from (("warning", "note", note, "") for note in probed.notes)
    yield from _rows(platform.findings)
    for refusal in platform.refusals:
        shown = "" if refusal.value is None else f"{refusal.value} (set by {refusal.who}): "
        yield "error", refusal.what, f"{shown}{refusal.reason} [{refusal.code}]", refusal.remedy
    if platform.resolved is not None:
        if platform.resolved.model is None:
            yield "", "backends", "not chosen: no model is set (--model-path) and no demo model is installed", ""
        else:
            yield "", "model", platform.resolved.model.name, ""
        yield from (("ok", "backend", str(choice), "") for choice in platform.resolved.resolved.backends.values())


def _choice(diagnosis: Diagnosis) -> Iterator[Row]:
    choice = diagnosis.choice
    requested = "automatic" if choice.asked is None else f"--device {choice.asked}"
    if choice.platform is None:
        yield "error", requested, choice.because, choice.remedy
    else:
        yield "ok", requested, choice.because, ""
        yield from (("warning", "unused", unused, "") for unused in choice.unused)
    if diagnosis.can_start:
        yield "ok", "verdict", f"a server can start here: srv launch --device {choice.asked or choice.platform}", ""
    else:
        yield "error", "verdict", "no server can start here; see the lines above that are marked no or error", ""

"""The findings of `srv doctor`: data that it prints as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from srv.cli.families import Plugin
from srv.errors import Rejection
from srv.planning.resolution import ResolvedPlan
from srv.platform.finding import Finding
from srv.platform.manifest import ProbeResult
from srv.platform.registry import InstalledPlatform


@dataclass(frozen=True, slots=True)
class ExaminedPlatform:
    """One platform. `resolved` is None if it is not available, or if its arguments are refused.

    `refusals`: of its arguments, or of what a launch refuses before it reads weights.
    """

    installed: InstalledPlatform
    probed: ProbeResult
    findings: tuple[Finding, ...] = ()
    resolved: ResolvedPlan | None = None
    refusals: tuple[Rejection, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether its devices are simulated: always, or those that its probe has found."""
        always = self.installed.manifest is not None and self.installed.manifest.simulated
        return always or (self.probed.device is not None and self.probed.device.simulated)

    @property
    def usable(self) -> bool:
        """Whether a server could start on it."""
        failed = any(finding.status == "error" for finding in self.findings)
        return self.probed.available and not failed and not self.refusals


@dataclass(frozen=True, slots=True)
class PlatformChoice:
    """The platform that a launch would use (None: it would be refused), the reason, and a remedy.

    unused: warnings about cards of this machine that the launch would not use.
    """

    asked: str | None
    platform: str | None
    because: str
    remedy: str = ""
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings."""

    versions: Mapping[str, str]
    environment: tuple[Finding, ...]
    platforms: Mapping[str, ExaminedPlatform]
    choice: PlatformChoice
    plugins: tuple[Plugin, ...] = ()

    @property
    def can_start(self) -> bool:
        """Whether `srv launch`, with the same --device, could serve on this machine."""
        chosen = self.platforms.get(self.choice.platform or "")
        findings = (*(finding.status for finding in self.environment), *(plugin.state for plugin in self.plugins))
        return chosen is not None and chosen.usable and "error" not in findings

"""What a check is given: the plugin under examination, its device, and its live platform, made when first asked for.

Lives in a child process of the run. Imports torch only where a live platform is wanted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from srv.errors import PlatformUnavailable, SrvError
from srv.platform.choose import ChosenPlatform, DeviceRequest, choose, parse_device
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import EngineContext, Manifest, ProbeResult
from srv.platform.probe import probe_all
from srv.platform.registry import InstalledPlatform, Platforms, find_platforms
from srv.testing.conformance.model import Fault

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import Platform

PROBE_SECONDS = 15.0


@dataclass
class Kit:
    """`device_text` is what `--device` said: NAME or NAME:VARIANT. `scratch`: a folder for what checks write."""

    device_text: str
    scratch: Path

    @functools.cached_property
    def request(self) -> DeviceRequest:
        return parse_device(self.device_text)

    @property
    def name(self) -> str:
        return self.request.name

    @functools.cached_property
    def platforms(self) -> Platforms:
        return find_platforms()

    @functools.cached_property
    def found(self) -> InstalledPlatform:
        """The plugin as discovery found it, refused or not. Fault if no distribution brings the name."""
        if self.name not in self.platforms:
            installed = ", ".join(sorted(self.platforms)) or "none"
            raise Fault(
                f"no installed distribution brings a platform called {self.name}; installed: {installed}",
                f'Install the plugin, and register it: [project.entry-points."srv.platforms"] {self.name} = "..."',
            )
        return self.platforms[self.name]

    @property
    def manifest(self) -> Manifest:
        """The checked manifest; PluginError if it was refused."""
        return self.found.loaded

    @functools.cached_property
    def probed(self) -> ProbeResult:
        """What the probe answers in its child process, asked once."""
        return probe_all({self.name: self.found}, PROBE_SECONDS)[self.name]

    @functools.cached_property
    def chosen(self) -> ChosenPlatform:
        """The device that a server would be started on. PlatformUnavailable or Refusal if there is none."""
        return choose(self.device_text, self.platforms, lambda found, timeout_s: {self.name: self.probed})

    @property
    def device_facts(self) -> DeviceFacts:
        return self.chosen.device

    @functools.cached_property
    def capabilities(self) -> frozenset[str]:
        return self.manifest.facts.capabilities(self.device_facts)

    @property
    def platform(self) -> Platform:
        """The live platform, ready to compute in this process. SrvError if it cannot be made."""
        if isinstance(self._created, SrvError):
            raise self._created
        return self._created

    @functools.cached_property
    def _created(self) -> Platform | SrvError:
        """Made once: a second try in the same process would fail for reasons of its own, such as an undone patch."""
        from srv.platform.contract import create_platform

        context = EngineContext(self.device_facts, local_rank=0, options=self._options())
        try:
            live = create_platform(self.found, context)
        except SrvError as error:
            return error
        live.init_worker(0)
        return live

    @property
    def device(self) -> torch.device:
        """The device of rank 0."""
        return self.platform.device(0)

    def _options(self) -> dict[str, object]:
        """Values of the arguments that the manifest asked for, as they are where nobody sets one."""
        from srv.args.resolve import resolve
        from srv.args.statement import UserInput
        from srv.testing.conformance.facts import small_model

        if not self.manifest.options:
            return {}
        resolved = resolve(UserInput(), manifest=self.manifest, device=self.device_facts, model=small_model())
        return {name: resolved.config.get(name) for name in self.manifest.options}

    def why_unavailable(self) -> str:
        """Why nothing can be computed here, in the plugin's own words; empty if it can."""
        try:
            self.chosen  # noqa: B018 - asked for, so that it is made
        except PlatformUnavailable as error:
            return f"{error.reason}. {error.remedy}"
        except (SrvError, Fault) as error:
            return str(error)
        return ""

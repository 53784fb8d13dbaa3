"""The argument of every check: the plugin, its device, and its live platform, which is created on first use.

It lives in a child process of the run, and imports torch only if a check needs the live platform.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srv.errors import PlatformUnavailable, Refusal, SrvError
from srv.platform.choose import ChosenPlatform, DeviceRequest, choose, parse_device
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import EngineContext, Manifest, ProbeResult
from srv.platform.probe import probe_all
from srv.platform.registry import InstalledPlatform, Platforms, find_platforms
from srv.testing.conformance.model import Fault

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import Platform
    from srv.platform.transfers import Transfers
    from srv.testing.conformance.setups import AttentionSetup

PROBE_SECONDS = 15.0


@dataclass
class Kit:
    """`device_text`: the value of `--device`, NAME or NAME:VARIANT. `scratch`: a folder for files of the checks.

    `rank` of `ranks`: as which rank of this host the live platform is created. `roles`: of attention backends, by
    name (`srv.testing.conformance.setups`). `wrong_writers`: the attention backends, by name and role, that store keys
    or values wrongly according to `attention.writes`. `import_seconds`: how long importing the manifest took; 0 before
    that. `setups`: those that were resolved, by what was asked, or why they were refused.
    """

    device_text: str
    scratch: Path
    rank: int = 0
    ranks: int = 1
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wrong_writers: set[str] = field(default_factory=set)
    import_seconds: float = 0.0
    setups: dict[tuple[Any, ...], AttentionSetup | Refusal] = field(default_factory=dict)

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
    def installed(self) -> InstalledPlatform:
        """The plugin as discovery found it, refused or not. Fault if no distribution provides the name."""
        if self.name not in self.platforms:
            names = ", ".join(sorted(self.platforms)) or "none"
            raise Fault(
                f"no installed distribution provides a platform named {self.name}; installed: {names}",
                f'Install the plugin, and register it: [project.entry-points."srv.platforms"] {self.name} = "..."',
            )
        started = time.perf_counter()
        installed = self.platforms[self.name]
        self.import_seconds = time.perf_counter() - started
        return installed

    @property
    def manifest(self) -> Manifest:
        """The validated manifest. Raises PluginError if it was refused."""
        return self.installed.loaded

    @functools.cached_property
    def probe_result(self) -> ProbeResult:
        """The result of the probe, which is asked once."""
        return self.probe()

    def probe(self) -> ProbeResult:
        """Ask the probe, in a child process of its own."""
        return probe_all({self.name: self.installed}, PROBE_SECONDS)[self.name]

    @functools.cached_property
    def chosen(self) -> ChosenPlatform:
        """The device on which a server would start. Raises PlatformUnavailable or Refusal if there is none."""
        return choose(self.device_text, self.platforms, lambda installed, timeout_s: {self.name: self.probe_result})

    @property
    def device_facts(self) -> DeviceFacts:
        return self.chosen.device

    @functools.cached_property
    def capabilities(self) -> frozenset[str]:
        return self.manifest.facts.capabilities(self.device_facts)

    @property
    def platform(self) -> Platform:
        """The live platform, initialized in this process. Raises SrvError if it cannot be created."""
        if isinstance(self._created, SrvError):
            raise self._created
        return self._created

    @functools.cached_property
    def _created(self) -> Platform | SrvError:
        """Created once: a second attempt in the same process could fail for another reason, such as an undone patch."""
        from srv.platform.contract import create_platform

        context = EngineContext(self.device_facts, self.rank, self._options(), self.ranks, self.rank)
        try:
            live = create_platform(self.installed, context)
        except SrvError as error:
            return error
        live.init_worker(self.rank)
        return live

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.platform.device(self.rank)

    @functools.cached_property
    def transfers(self) -> Transfers:
        """The copies of the live platform."""
        from srv.platform.transfers import Transfers

        return Transfers(self.platform, self.device)

    def synchronize(self) -> None:
        """Wait until everything that is enqueued for computing is done."""
        self.transfers.streams.compute.record().synchronize()

    def _options(self) -> dict[str, object]:
        """Default values of the arguments that the manifest requests."""
        from srv.args.resolve import resolve
        from srv.args.statement import UserInput
        from srv.testing.conformance.facts import small_model

        if not self.manifest.options:
            return {}
        resolved = resolve(UserInput(), manifest=self.manifest, device=self.device_facts, model=small_model())
        return {name: resolved.config.get(name) for name in self.manifest.options}

    def unavailable_reason(self) -> str:
        """Why the device cannot be used on this machine, in the plugin's own words; empty if it can."""
        try:
            self.chosen  # noqa: B018 - read, so that it is created
        except PlatformUnavailable as error:
            return f"{error.reason}. {error.remedy}"
        except (SrvError, Fault) as error:
            return str(error)
        return ""

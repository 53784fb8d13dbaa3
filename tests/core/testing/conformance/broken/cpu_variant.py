"""The CPU platform's plugin under another name and with replaced parts, for faults that only several ranks show.

The toy device, from which the other plugins are made, is a single device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from srv.platform.manifest import EngineContext, Manifest
from srv_cpu.manifest import MANIFEST

if TYPE_CHECKING:
    from srv.dist.group import RankGroup
    from srv.platform.interface import Platform
    from srv_cpu.communicator import CpuCommunicator
    from srv_cpu.platform import CpuPlatform

Alter = Callable[[type["CpuPlatform"]], type["CpuPlatform"]]


def manifest(name: str, platform: Alter) -> Manifest:
    """The CPU's manifest as platform `name`. `platform` returns its class, given the CPU's class under that name."""

    def create(context: EngineContext) -> Platform:
        from srv_cpu.platform import CpuPlatform

        class Renamed(CpuPlatform):
            @property
            def name(self) -> str:
                return name

        return platform(Renamed)(context)

    return dataclasses.replace(MANIFEST, name=name, create=create)


def with_communicator(make: Callable[[type[CpuCommunicator]], Callable[[RankGroup], Any]]) -> Alter:
    """A platform whose communicators are created by `make(the CPU's class)(group)`."""

    def platform(cpu: type[CpuPlatform]) -> type[CpuPlatform]:
        class Altered(cpu):  # type: ignore[valid-type, misc]
            def communicator(self, group: RankGroup) -> Any:
                from srv_cpu.communicator import CpuCommunicator

                return make(CpuCommunicator)(group)

        return Altered

    return platform

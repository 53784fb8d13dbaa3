"""What a platform plugin's entry point gives: pure data and pure functions. Imports no torch, no SDK.

    [project.entry-points."srv.platforms"]
    npu = "srv_npu.manifest:MANIFEST"

The entry point's name is the platform's name, the one that `--device` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srv.platform.facts import DeviceFacts, PlatformFacts

if TYPE_CHECKING:
    from srv.platform.interface import Platform


DEFAULT_TIMEOUT_S = 15.0  # of a probe


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """What a probe may use: the seconds it has before it is ended."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a plugin found on this machine.

    Not available: `reason` says why and `remedy` what to do, both for an operator, and `code` is stable
    ("driver_missing"). Available: `device` holds the facts; `notes` are warnings (an unknown variant).
    """

    available: bool
    reason: str = ""
    remedy: str = ""
    code: str = ""
    device: DeviceFacts | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What `create` gets: the device that the probe saw, this process's rank and its place on this host.

    `options` are values of resolved arguments that the manifest asked for in `Manifest.options`.
    """

    device: DeviceFacts
    rank: int
    local_rank: int
    options: Mapping[str, object] = field(default_factory=dict)


def _no_environment(device: DeviceFacts, rank: int) -> Mapping[str, str]:
    return {}


AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True)
class Manifest:
    """A platform, described.

    name: as in `--device`. api: the contract version it was written for. core: the versions of `srv` it
    works with (PEP 440 specifiers). variants: device generations that it knows. priority: automatic choice
    takes the highest among available platforms (cpu is 0). simulated: never chosen automatically, and
    shown as a simulator wherever its name shows. create: the only step that may import the vendor's SDK.
    """

    name: str
    api: tuple[int, int]
    core: str
    variants: tuple[str, ...]
    priority: int
    summary: str
    facts: PlatformFacts
    probe: Callable[[ProbeContext], ProbeResult]
    create: Callable[[EngineContext], Platform]
    simulated: bool = False
    options: tuple[str, ...] = ()
    worker_env: Callable[[DeviceFacts, int], Mapping[str, str]] = _no_environment


def worker_environment(manifest: Manifest, device: DeviceFacts, rank: int = 0) -> dict[str, str]:
    """What core adds to a worker's environment: the platform's word, and that torch loads no backend by itself.

    A vendor's wheel without its driver would make `import torch` fail on every platform, and the SDK of a platform is
    imported by its `create`.
    """
    return {AUTOLOAD: "0", **manifest.worker_env(device, rank)}

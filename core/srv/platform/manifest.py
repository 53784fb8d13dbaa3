"""The manifest, which a platform plugin's entry point names: pure data and pure functions. No torch, no SDK.

    [project.entry-points."srv.platforms"]
    npu = "srv_npu.manifest:MANIFEST"

The entry point's name is the platform's name, as given to `--device`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from srv.platform.facts import DeviceFacts, PlatformFacts
from srv.platform.sensors import Readings

if TYPE_CHECKING:
    from srv.platform.interface import Platform


DEFAULT_TIMEOUT_S = 15.0  # of a probe


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """The argument of a probe: the seconds after which its process is killed."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a plugin found on this machine.

    Not available: `reason` says why and `remedy` says what to do, both for an operator; `code` is a stable
    identifier ("driver_missing"). Available: `device` holds the facts; `notes` are warnings (an unknown variant).
    `present`: the platform's cards that this machine lists (`srv.platform.pci`), usable or not: with a refusal, they
    turn it into a warning that a card is unused.
    """

    available: bool
    reason: str = ""
    remedy: str = ""
    code: str = ""
    device: DeviceFacts | None = None
    notes: tuple[str, ...] = ()
    present: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The argument of `create`: the device that the probe found, and this process's rank on this host.

    `local_ranks`: the number of ranks on this host, which share what belongs to the host (processor cores, host
    memory). `options` are the resolved values of the arguments that `Manifest.options` names. `device_index`: which of
    the host's devices this rank computes on (`Platform.device`). `numa_node`: the node whose processors and memory this
    process has been bound to; None if it has not been bound. `node_ranks`: the number of ranks on that node, or on this
    host if ranks are not bound.
    """

    device: DeviceFacts
    local_rank: int
    options: Mapping[str, object] = field(default_factory=dict)
    local_ranks: int = 1
    device_index: int = 0
    numa_node: int | None = None
    node_ranks: int = 1


def _no_environment(device: DeviceFacts, rank: int) -> Mapping[str, str]:
    return {}


def _no_sensors(device: DeviceFacts) -> Readings:
    return Readings()


AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True)
class Manifest:
    """The description of a platform.

    name: as in `--device`. api: the contract version it was written for. core: the versions of `srv` it
    works with (PEP 440 specifiers). variants: the device generations it supports. priority: automatic choice
    takes the highest among available platforms (cpu is 0). simulated: never chosen automatically, and
    marked as a simulator wherever it is listed. options: arguments that `create` needs the values of.
    worker_env: environment variables for a worker process. create: the only step that may import the vendor's SDK.
    sensors: what the devices report of themselves now, for `srv doctor` and `/metrics`. The API process calls it at
    each scrape, in a thread of its own, and waits only briefly. It imports no torch and computes nothing on the device.
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
    sensors: Callable[[DeviceFacts], Readings] = _no_sensors


def worker_environment(manifest: Manifest, device: DeviceFacts, rank: int = 0) -> dict[str, str]:
    """The variables that core adds to a worker's environment: the platform's own, and torch's backend autoload off.

    With autoload on, a vendor's wheel without its driver would make `import torch` fail on every platform. The SDK of
    a platform is imported by its `create`.
    """
    return {AUTOLOAD: "0", **manifest.worker_env(device, rank)}

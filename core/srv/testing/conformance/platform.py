"""L1: the live platform: start-up, device, memory, events and diagnosis."""

from __future__ import annotations

import torch

from srv.errors import PluginError
from srv.platform.interface import Check, Memory
from srv.platform.streams import Streams
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault

_SIZE = 64
_MEMORY_TOLERANCE = 0.25


def starts(kit: Kit) -> str:
    """`create` returns a platform, and `init_worker` initializes it."""
    try:
        platform = kit.platform
    except PluginError as error:
        if error.code == "patches_core":
            return "it starts, but patches srv"  # the next check reports that
        raise Fault(f"{error.distribution}: {error.member}: {error.reason}", f"{error.remedy}.") from error
    return f"{type(platform).__name__} is up on {kit.device}"


def patches(kit: Kit) -> str:
    """`create` does not change srv."""
    try:
        kit.platform  # noqa: B018 - read, so that it is created
    except PluginError as error:
        raise Fault(f"{error.distribution}: {error.member}: {error.reason}", f"{error.remedy}.") from error
    return "no name or function of srv has changed"


def device(kit: Kit) -> str:
    """The device holds tensors and computes on them, and the results stay there."""
    where: object = kit.platform.device(0)
    if not isinstance(where, torch.device):
        raise Fault(f"device(0) returned a {type(where).__name__}, not a torch.device")
    matrix = torch.arange(_SIZE, dtype=torch.float32).view(8, 8).to(where)
    product = matrix @ matrix
    if not same_device(product.device, where):
        raise Fault(f"the product of two tensors on {where} is on {product.device}")
    if not torch.equal(product.to("cpu"), matrix.to("cpu") @ matrix.to("cpu")):
        raise Fault(f"an 8 x 8 product of integers on {where} differs from the host's")
    host = torch.device("cpu")
    if "host_memory" in kit.capabilities and where.type != host.type:
        raise Fault(
            f"it declares host_memory, but its device is {where}",
            "Remove host_memory from the capabilities: it means that the device computes in host memory.",
        )
    return f"computes on {where}"


def memory(kit: Kit) -> str:
    """0 <= free <= total, in bytes, and the total is within a quarter of the probe's.

    Drivers keep some percent for themselves and for error correction, and a container may have a part of the host.
    """
    now: object = kit.platform.memory(kit.device)
    if not isinstance(now, Memory):
        raise Fault(f"memory returned a {type(now).__name__}, not a Memory")
    if not (isinstance(now.free, int) and isinstance(now.total, int) and 0 <= now.free <= now.total and now.total):
        raise Fault(f"memory returned free={now.free} and total={now.total}; both must be int, 0 <= free <= total")
    probed = kit.device_facts.memory_bytes
    if abs(now.total / probed - 1) > _MEMORY_TOLERANCE:
        raise Fault(f"memory reports {now.total} bytes in total, but the probe reported {probed}")
    return f"{now.free} of {now.total} bytes are free"


def events(kit: Kit) -> str:
    """After waiting for an event, a copy to the host that was enqueued before it is complete."""
    streams: object = kit.platform.streams(kit.device)
    if not isinstance(streams, Streams):
        raise Fault(f"streams returned a {type(streams).__name__}, not srv.platform.streams.Streams")
    compute = streams.compute
    work = torch.full((512, 512), 1.0 / 512).to(kit.device)
    for index in range(5):
        result = work
        for _ in range(20):
            result = result @ work
        copy = kit.platform.staging((512, 512), torch.float32).copy_(result + index, non_blocking=True)
        event: object = compute.record()
        if not callable(getattr(event, "synchronize", None)):
            raise Fault(f"the compute stream recorded a {type(event).__name__} without synchronize()")
        event.synchronize()  # type: ignore[attr-defined]
        expected = 1.0 / 512 + index
        if not bool(((copy - expected).abs() < 0.05).all()):
            raise Fault("a copy to the host is not complete after the event that was recorded behind it")
    return "five copies to the host were complete after their events"


def diagnose(kit: Kit) -> str:
    """The diagnosis is a list of checks, and every failed one has a remedy."""
    checks: object = kit.platform.diagnose()
    if not isinstance(checks, list) or not checks or not all(isinstance(check, Check) for check in checks):
        raise Fault(f"diagnose returned {checks!r}, not a non-empty list of srv.platform.interface.Check")
    for check in checks:
        if not check.name or not check.detail:
            raise Fault(f"a check of the diagnosis has no name or no detail: {check!r}")
        if not check.ok and not check.remedy:
            raise Fault(f"the failed check {check.name} of the diagnosis ({check.detail}) has no remedy")
    bad = [f"{check.name}: {check.detail}. {check.remedy}" for check in checks if not check.ok]
    return f"{len(checks)} checks{'; failed: ' + '; '.join(bad) if bad else ', all ok'}"


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are the same; without an index, the first one is meant."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)

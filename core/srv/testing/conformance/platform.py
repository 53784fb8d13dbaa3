"""L1: the live platform: how it starts, where its tensors live, its memory, events and diagnosis."""

from __future__ import annotations

import torch

from srv.errors import PluginError
from srv.platform.interface import Check, Memory
from srv.testing.conformance.kit import Kit
from srv.testing.conformance.model import Fault

_SIZE = 64


def starts(kit: Kit) -> str:
    """`create` gives a platform and `init_worker` makes it ready."""
    try:
        platform = kit.platform
    except PluginError as error:
        if error.code == "patches_core":
            return "it starts, and patches srv while it does"  # the next check reports it
        raise Fault(f"{error.distribution}: {error.member}: {error.reason}", f"{error.remedy}.") from error
    return f"{type(platform).__name__} is up on {kit.device}"


def patches(kit: Kit) -> str:
    """`create` changes nothing of srv."""
    try:
        kit.platform  # noqa: B018 - asked for, so that it is made
    except PluginError as error:
        raise Fault(f"{error.distribution}: {error.member}: {error.reason}", f"{error.remedy}.") from error
    return "every name and function of srv is as it was"


def device(kit: Kit) -> str:
    """The device holds tensors and computes on them, and the results stay there."""
    where: object = kit.platform.device(0)
    if not isinstance(where, torch.device):
        raise Fault(f"device(0) gave a {type(where).__name__}, not a torch.device")
    left = torch.arange(_SIZE, dtype=torch.float32).view(8, 8).to(where)
    product = left @ left
    if not same_device(product.device, where):
        raise Fault(f"the product of two tensors on {where} is on {product.device}")
    if not torch.equal(product.to("cpu"), left.to("cpu") @ left.to("cpu")):
        raise Fault(f"an 8 x 8 product of whole numbers on {where} differs from the host's")
    host = torch.device("cpu")
    if "host_memory" in kit.capabilities and where.type != host.type:
        raise Fault(
            f"it declares host_memory, but its device is {where}",
            "Leave host_memory out of the capabilities: it says that the device computes in the host's own memory.",
        )
    return f"computes on {where}"


def memory(kit: Kit) -> str:
    """0 <= free <= total, in bytes, and a total like the probe's."""
    now: object = kit.platform.memory(kit.device)
    if not isinstance(now, Memory):
        raise Fault(f"memory gave a {type(now).__name__}, not a Memory")
    if not (isinstance(now.free, int) and isinstance(now.total, int) and 0 <= now.free <= now.total and now.total):
        raise Fault(f"memory says {now.free} of {now.total} bytes free; both are whole numbers, 0 <= free <= total")
    said = kit.device_facts.memory_bytes
    if not 0.5 <= now.total / said <= 2:
        raise Fault(f"memory says {now.total} bytes in all, the probe says {said}")
    return f"{now.free} of {now.total} bytes are free"


def events(kit: Kit) -> str:
    """After an event was waited for, a copy to the host that was enqueued before it is there."""
    work = torch.full((512, 512), 1.0 / 512).to(kit.device)
    for turn in range(5):
        result = work
        for _ in range(20):
            result = result @ work
        copy = (result + turn).to("cpu", non_blocking=True)
        event: object = kit.platform.record_event(kit.device)
        if not callable(getattr(event, "synchronize", None)):
            raise Fault(f"record_event gave a {type(event).__name__} without synchronize()")
        event.synchronize()  # type: ignore[attr-defined]
        wanted = 1.0 / 512 + turn
        if not bool(((copy - wanted).abs() < 0.05).all()):
            raise Fault("a copy to the host is not there after the event that followed it was waited for")
    return "five copies to the host were there when their events had passed"


def diagnose(kit: Kit) -> str:
    """The diagnosis is made of checks, all well here, and says what to do about those that are not."""
    checks: object = kit.platform.diagnose()
    if not isinstance(checks, list) or not checks or not all(isinstance(check, Check) for check in checks):
        raise Fault(f"diagnose gave {checks!r}, not a list of srv.platform.interface.Check with something in it")
    for check in checks:
        if not check.name or not check.detail:
            raise Fault(f"a check of the diagnosis has no name or no detail: {check!r}")
        if not check.ok and not check.remedy:
            raise Fault(f"the diagnosis finds fault with {check.name} ({check.detail}) and does not say what to do")
    bad = [f"{check.name}: {check.detail}. {check.remedy}" for check in checks if not check.ok]
    return f"{len(checks)} checks{'; not well: ' + '; '.join(bad) if bad else ', all well'}"


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one; without an index, the first is meant."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)

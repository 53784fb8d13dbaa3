"""Checks that are the same on every device with memory of its own: what a platform's `diagnose` may return first."""

from __future__ import annotations

from srv.platform.facts import DeviceFacts
from srv.platform.interface import Check, Memory

_GIB = 1 << 30


def device_checks(facts: DeviceFacts, memory: Memory, processes: str = "") -> list[Check]:
    """The device, its versions and its free memory.

    processes: how to list the processes that use the device, as a clause for the remedy ("smi lists them").
    """
    versions = ", ".join(f"{name} {version}" for name, version in sorted(facts.versions.items()))
    process_list = f" ({processes})" if processes else ""
    free = memory.free > 0
    return [
        Check("device", True, f"{facts.count} x {facts.name}, {facts.variant}"),
        Check("versions", True, versions or "none reported"),
        Check(
            "memory",
            free,
            f"{memory.free / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free",
            "" if free else f"Stop the other processes on the device{process_list}.",
        ),
    ]


def verdict(name: str, is_right: bool, what: str, remedy: str) -> Check:
    """The check of a small computation: "WHAT right", or "WHAT wrong" with a remedy. what: "a norm is"."""
    return Check(name, is_right, f"{what} {'right' if is_right else 'wrong'}", "" if is_right else remedy)

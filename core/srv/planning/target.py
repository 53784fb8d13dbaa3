"""Targets of a resolution: this machine's device, as probes find it, or one that is only described. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from srv.args.statement import amount_text
from srv.errors import PlatformUnavailable
from srv.platform.choose import choose, device_for_plan, parse_device
from srv.platform.facts import BackendSpec, DeviceFacts
from srv.platform.manifest import Manifest
from srv.platform.registry import find_all_backends, find_platforms


class Target(NamedTuple):
    """A platform and its device, why this platform was chosen, third-party backends by family, and warnings."""

    manifest: Manifest
    device: DeviceFacts
    reason: str
    extra: Mapping[str, tuple[BackendSpec, ...]]
    notes: tuple[str, ...] = ()

    def backends(self, family: str) -> tuple[BackendSpec, ...]:
        """All backends of a family."""
        return (*self.manifest.facts.backends.get(family, ()), *self.extra.get(family, ()))


def device_text(platform: str, device: DeviceFacts) -> str:
    """A device in one line: platform and variant, count, memory, and the vendor's name."""
    memory = amount_text(device.memory_bytes, "bytes")
    return f"{platform}:{device.variant}, {device.count} x {memory}{', ' + device.name if device.name else ''}"


def make_target(manifest: Manifest, device: DeviceFacts, reason: str, notes: tuple[str, ...] = ()) -> Target:
    return Target(manifest, device, reason, find_all_backends(manifest.name), notes)


def this_machine(text: str | None, source: str) -> Target:
    """The requested platform, or the best available one, with the device that its probe finds here."""
    chosen = choose(text, find_platforms(), source=source)
    return make_target(chosen.installed.loaded, chosen.device, chosen.reason, chosen.notes)


def find_target(text: str | None, source: str = "command line") -> Target:
    """The device that a text describes; this machine's own if the text has no profile and the platform is available.

    Refusal, or PlatformUnavailable if the platform is unknown (or if none is available and `text` is None).
    """
    if text is None:
        return this_machine(None, source)
    request = parse_device(text, source)
    platforms = find_platforms()
    device = device_for_plan(request, platforms) if _describes_device(text) else _local_or_only_device(text, source)
    return make_target(platforms[request.name].loaded, device, f"set by {source}")


def _describes_device(text: str) -> bool:
    return ":" in text or "," in text


def _local_or_only_device(text: str, source: str) -> DeviceFacts:
    """The device of a bare platform name: this machine's if there is one, else the platform's only profile."""
    request = parse_device(text, source)
    platforms = find_platforms()
    try:
        return choose(text, platforms, source=source).device
    except PlatformUnavailable:
        return device_for_plan(request, platforms)

"""The probe of a simulated GPU. Torch-free, as it runs where probes of real devices do."""

from __future__ import annotations

from collections.abc import Mapping

from srv.errors import PlatformUnavailable
from srv.platform.facts import DeviceFacts
from srv.platform.manifest import ProbeResult
from srv_gpu.simulator import simulated_count, simulated_facts, simulated_note, simulated_variant


def simulated_probe(
    platform: str, profiles: Mapping[str, DeviceFacts], stand_ins: Mapping[str, Mapping[str, str]]
) -> ProbeResult | None:
    """The simulated device that the environment asks for, or why it cannot be; None for real devices.

    stand_ins: by variant, versions of the vendor's libraries that the simulator imitates.
    """
    try:
        variant, count = simulated_variant(platform), simulated_count(platform)
    except PlatformUnavailable as error:
        return ProbeResult(False, error.reason, error.remedy, error.code)
    if variant is None:
        return None
    device = simulated_facts(variant, profiles, stand_ins.get(variant, {}), count)
    return ProbeResult(True, device=device, notes=(simulated_note(device),))

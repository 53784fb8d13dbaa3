"""What devices report of themselves: utilization, temperature, power, memory, throttling. Torch-free data.

A platform's `Manifest.sensors` returns it; `srv doctor` prints it, and `/metrics` exports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """One device, now. None: its driver does not report this.

    device: its index, as the driver counts. utilization: the share of the last period, from 0 to 1, in which it
    computed. temperature: degrees Celsius. power: watts. memory_used, memory_total: bytes, for all processes. throttle:
    by reason ("power_cap"), whether its clock is lowered now.
    """

    device: str
    name: str
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    throttle: Mapping[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        gib = 1 << 30
        used, total = self.memory_used, self.memory_total
        of = "" if total is None else f" of {total / gib:.1f}"
        lowered = " and ".join(reason for reason, active in self.throttle.items() if active)
        parts = (
            None if self.utilization is None else f"{100 * self.utilization:.0f} % busy",
            None if self.temperature is None else f"{self.temperature:.0f} °C",
            None if self.power is None else f"{self.power:.0f} W",
            None if used is None else f"{used / gib:.1f}{of} GiB used",
            f"clock lowered by {lowered}" if lowered else None,
        )
        return f"{self.name} ({self.device}): {', '.join(filter(None, parts)) or 'reports nothing'}"


@dataclass(frozen=True, slots=True)
class Readings:
    """All devices; or, in `missing`, a clause that says why there are none, with a remedy if there is one."""

    devices: tuple[Reading, ...] = ()
    missing: str = ""
    remedy: str = ""

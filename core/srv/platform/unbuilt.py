"""For a platform that is described before its device code is there: facts that are true, and a refusal in its place.

A plugin makes one `Unbuilt`, builds its backend specs with it, and ends its probe with it; whatever would compute then
refuses before a weight is read. Knows no platform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from srv.errors import PlatformUnavailable
from srv.platform.facts import BackendSpec, DeviceFacts, Requires, Seen, Unfit
from srv.platform.manifest import ProbeResult

CODE = "not_implemented"


def fits(seen: Seen) -> Requires:
    """The check of a backend that fits everywhere and requires nothing."""
    return Requires()


@dataclass(frozen=True, slots=True)
class Unbuilt:
    """Device code that is not there yet.

    name: of the platform. devices: what it describes, in words ("Imagined Mk 1"). target: where `create` can be
    imported from, as "module:attribute"; its backends point there too.
    """

    name: str
    devices: str
    target: str

    @property
    def reason(self) -> str:
        """Why nothing computes, a clause."""
        return f"this version of srv describes {self.devices} devices but cannot compute on them yet"

    @property
    def remedy(self) -> str:
        plan = f"`srv plan --device {self.name}:PROFILE`"
        return f"Use {plan} to check flags for such a machine, or serve on another platform"

    def create(self, context: object) -> NoReturn:
        """The manifest's `create`, and what the target of its backends names. Raises PlatformUnavailable."""
        raise PlatformUnavailable(self.name, self.reason, self.remedy, CODE)

    def found(self, device: DeviceFacts, notes: tuple[str, ...] = ()) -> ProbeResult:
        """The probe's answer where hardware, driver and toolkit are in place."""
        return ProbeResult(False, f"{device.name} is here, but {self.reason}", self.remedy, CODE, device, notes)

    def attention(
        self, name: str, priority: int, summary: str, check: Callable[[Seen], Requires | Unfit] = fits
    ) -> BackendSpec:
        """An attention backend over a pool of pages of tokens of heads, whose steps are captured."""
        return BackendSpec(name, priority, check, self.target, "page_token_head", summary, graphs=True)

    def backend(
        self, name: str, priority: int, summary: str, check: Callable[[Seen], Requires | Unfit] = fits
    ) -> BackendSpec:
        """A backend of any other family."""
        return BackendSpec(name, priority, check, self.target, summary=summary)

"""For a platform with facts but no device code yet: `srv plan` resolves, and says that a launch would be refused.

A plugin creates one `PlatformPlaceholder`, builds its backend specs with it and returns its probe result from it. A
launch is then refused before any weight is read. Must not know any platform.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from srv.errors import PlatformUnavailable
from srv.platform.facts import BackendSpec, DeviceFacts, Requires, ResolutionContext, Unfit
from srv.platform.manifest import ProbeResult
from srv.specs import LAYER_TRAITS

NO_DEVICE_CODE = "not_implemented"


def fits(context: ResolutionContext) -> Requires:
    """The check of a backend that fits everywhere and requires nothing."""
    return Requires()


@dataclass(frozen=True, slots=True)
class DescribedBackend(BackendSpec):
    """A backend without device code. `reason` and `remedy` are clauses for a launch that would use it."""

    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class PlatformPlaceholder:
    """A platform whose device code is not implemented yet.

    name: of the platform. devices: the described devices, for messages ("Imagined Mk 1"). target: where `create` can be
    imported from, as "module:attribute"; the backend specs have the same target.
    """

    name: str
    devices: str
    target: str

    @property
    def reason(self) -> str:
        """The reason for a refusal, as a clause."""
        return f"this version of srv describes {self.devices} devices but cannot compute on them yet"

    @property
    def remedy(self) -> str:
        plan = f"`srv plan --device {self.name}:PROFILE`"
        return f"Use {plan} to check flags for such a machine, or serve on another platform"

    def create(self, context: object) -> NoReturn:
        """The manifest's `create`, and the target of its backends. Raises PlatformUnavailable."""
        raise PlatformUnavailable(self.name, self.reason, self.remedy, NO_DEVICE_CODE)

    def probe_result(self, device: DeviceFacts, notes: tuple[str, ...] = ()) -> ProbeResult:
        """The result of a probe that has found hardware, driver and toolkit."""
        return ProbeResult(
            False, f"{device.name} is present, but {self.reason}", self.remedy, NO_DEVICE_CODE, device, notes
        )

    def attention(
        self, name: str, priority: int, check: Callable[[ResolutionContext], Requires | Unfit] = fits
    ) -> BackendSpec:
        """The spec of an attention backend with the KV order page_token_head, whose steps can be captured.

        Only its check refuses layers.
        """
        return DescribedBackend(
            name,
            priority,
            check,
            self.target,
            "page_token_head",
            graphs=True,
            traits=LAYER_TRAITS,
            latent=self.target,
            reason=self.reason,
            remedy=self.remedy,
        )

    def backend(
        self, name: str, priority: int, check: Callable[[ResolutionContext], Requires | Unfit] = fits
    ) -> BackendSpec:
        """The spec of a backend of any other family."""
        return DescribedBackend(name, priority, check, self.target, reason=self.reason, remedy=self.remedy)

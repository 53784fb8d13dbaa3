"""The one exception tree of `srv`, drawn here and coded in this order.

    SrvError
    ├── Refusal             what the operator asked for cannot be done; carries every `Rejected` found
    ├── PlatformUnavailable a device was asked for and its platform cannot serve here
    ├── PluginError         a plugin breaks the platform contract
    ├── ModelError          model files are missing, damaged, or of an unknown architecture
    ├── RequestError        one request cannot be served; becomes an HTTP 4xx, the server lives on
    └── InternalError       a bug of ours: an invariant does not hold
        ├── IntegrityError  pages or locks do not add up
        └── EngineDead      the engine process is gone

Every text says: what, which value, who set it, why not, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class SrvError(Exception):
    """Base of everything that `srv` raises on purpose."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A refusal as a value: one argument, pair or choice that cannot be accepted.

    `code` is a stable snake_case identifier (the support matrix prints it), `what` names the argument or
    subject, `value` is the refused value as the user would write it (None: none was set), `who` set it
    ("command line", "config file serve.yaml", "platform npu 0.1.0"), `reason` says why not and `remedy`
    what to do.
    """

    code: str
    what: str
    value: str | None
    who: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        shown = self.what if self.value is None else f"{self.what} = {self.value}"
        return f"{shown} (set by {self.who}): {self.reason}. {self.remedy} [{self.code}]"


class Refusal(SrvError):
    """All refusals of one start, printed together. The command line exits with status 2."""

    def __init__(self, rejections: Sequence[Rejected]) -> None:
        self.rejections = tuple(rejections)
        super().__init__("\n".join(str(rejected) for rejected in self.rejections))


class PlatformUnavailable(SrvError):
    """The platform asked for cannot be used here. Carries the plugin's own reason and remedy."""

    def __init__(self, platform: str, reason: str, remedy: str, code: str = "unavailable") -> None:
        self.platform, self.reason, self.remedy, self.code = platform, reason, remedy, code
        super().__init__(f"platform {platform} cannot be used: {reason}. {remedy} [{code}]")


class PluginError(SrvError):
    """A plugin was refused when it was loaded.

    `code` is a stable word for the kind of fault: contract (any that has no word of its own), version,
    unknown_member, signature, text (a sentence is missing), impure, patches_core, import_failed, contested.
    """

    def __init__(self, distribution: str, member: str, reason: str, remedy: str, code: str = "contract") -> None:
        self.distribution, self.member, self.reason, self.remedy = distribution, member, reason, remedy
        self.code = code
        super().__init__(f"plugin {distribution}: {member}: {reason}. {remedy}")


class ModelError(SrvError):
    """Model files cannot be used. `code` is stable: not_found, truncated, unknown_architecture, ..."""

    def __init__(self, code: str, what: str, reason: str, remedy: str) -> None:
        self.code, self.what, self.reason, self.remedy = code, what, reason, remedy
        super().__init__(f"model {what}: {reason}. {remedy} [{code}]")


class RequestError(SrvError):
    """One request cannot be served. `status` is an HTTP status, `param` the field at fault, if one is."""

    def __init__(self, message: str, *, code: str, param: str | None = None, status: int = 400) -> None:
        self.message, self.code, self.param, self.status = message, code, param, status
        super().__init__(message)


class InternalError(SrvError):
    """A bug in `srv` itself."""


class IntegrityError(InternalError):
    """free + cached + held != total, a page was freed twice, or a lock count went below zero."""


class EngineDead(InternalError):
    """The engine process ended while requests were waiting for it."""

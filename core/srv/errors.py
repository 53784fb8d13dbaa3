"""The exception hierarchy of `srv`, defined below in the order of this tree.

    SrvError
    ├── Refusal             the requested configuration is not possible; carries every `Rejection` found
    ├── PlatformUnavailable the platform of the requested device cannot serve on this machine
    ├── PluginError         a plugin violates the platform contract
    ├── ModelError          model files are missing, damaged, or of an unknown architecture
    ├── StartError          the engine or one of its ranks could not start; carries messages for the operator
    ├── OutOfMemory         memory ran out; names the line of the memory ledger that was wrong
    ├── RequestError        one request cannot be served; becomes an HTTP 4xx response, the server goes on
    ├── GrammarError        a grammar for structured output cannot be compiled; becomes a RequestError
    │   ├── EmptyGrammar    no text follows it
    │   └── NotEnforceable  a schema says what no grammar holds
    └── InternalError       a bug in `srv`: an invariant does not hold
        ├── IntegrityError  pages, slots or locks do not add up
        └── EngineDead      the engine process has ended

Every message says what was refused, which value, who set it, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_LISTED = 5  # names in one message


class SrvError(Exception):
    """Base class of all exceptions that `srv` raises deliberately."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refusal as a value: one argument, combination or choice that cannot be accepted.

    `code` is a stable snake_case identifier (the support matrix prints it). `what` names the argument or subject.
    `value` is the refused value as the user would write it (None: no value was set). `who` names the source of the
    value ("command line", "config file serve.yaml", "platform npu 0.1.0"). `reason` says why it is refused and
    `remedy` what to do.
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


def as_sentence(remedy: str) -> str:
    """With the full stop that the remedies of exceptions lack."""
    return remedy if remedy.endswith((".", "?")) else f"{remedy}."


def listed(names: Collection[str]) -> str:
    """The first few names, and the total number."""
    shown = ", ".join(list(names)[:MAX_LISTED])
    return shown if len(names) <= MAX_LISTED else f"{shown} and {len(names) - MAX_LISTED} more ({len(names)} in all)"


class Refusal(SrvError):
    """All refusals of one launch, printed together. The command line exits with status 2."""

    def __init__(self, rejections: Sequence[Rejection]) -> None:
        self.rejections = tuple(rejections)
        super().__init__("\n".join(str(rejected) for rejected in self.rejections))


class PlatformUnavailable(SrvError):
    """The requested platform cannot be used on this machine. Carries the plugin's own reason and remedy."""

    def __init__(self, platform: str, reason: str, remedy: str, code: str = "unavailable") -> None:
        self.platform, self.reason, self.remedy, self.code = platform, reason, remedy, code
        super().__init__(f"platform {platform} cannot be used: {reason}. {remedy} [{code}]")


class PluginError(SrvError):
    """A plugin was refused when it was loaded.

    `code` is a stable identifier of the kind of fault: version, unknown_member, signature, text (a description is
    missing), impure (the manifest imports torch), patches_core, import_failed, contested (two distributions provide one
    name), or contract for any other violation.
    """

    def __init__(self, distribution: str, member: str, reason: str, remedy: str, code: str = "contract") -> None:
        self.distribution, self.member, self.reason, self.remedy = distribution, member, reason, remedy
        self.code = code
        super().__init__(f"plugin {distribution}: {member}: {reason}. {remedy}")


class ModelError(SrvError):
    """Model files cannot be used. `code` is a stable identifier: not_found, truncated, unknown_architecture, ..."""

    def __init__(self, code: str, what: str, reason: str, remedy: str) -> None:
        self.code, self.what, self.reason, self.remedy = code, what, reason, remedy
        super().__init__(f"model {what}: {reason}. {remedy} [{code}]")

    def renamed(self, path: str, name: str) -> ModelError:
        """The same error with the name that the user gave to what lies at `path`."""
        return ModelError(self.code, self.what.replace(path, name), self.reason.replace(path, name), self.remedy)

    def rejection(self, path: str | None, who: str) -> Rejection:
        """The refusal of --model-path; `who` has set it."""
        return Rejection(self.code, "model_path", path, who, f"{self.what}: {self.reason}", as_sentence(self.remedy))


class StartError(SrvError):
    """The engine or a rank could not start. `lines` are messages for the operator; `status` is the exit status."""

    def __init__(self, lines: list[str], status: int) -> None:
        self.lines, self.status = lines, status
        super().__init__("\n".join(lines))


class OutOfMemory(SrvError):
    """Memory ran out at the start or in a step. `line`: that of the memory ledger that was wrong."""

    def __init__(self, what: str, line: str, reason: str, remedy: str) -> None:
        self.line, self.reason, self.remedy = line, reason, remedy
        super().__init__(f"{what}. The line of the memory ledger that was wrong is {line}: {reason}. {remedy}")


class RequestError(SrvError):
    """One request cannot be served. `status` is the HTTP status, `param` the field at fault (None: no single one)."""

    def __init__(self, message: str, *, code: str, param: str | None = None, status: int = 400) -> None:
        self.message, self.code, self.param, self.status = message, code, param, status
        super().__init__(message)


class GrammarError(SrvError):
    """A grammar for structured output cannot be compiled. The message says why, as a clause about the grammar."""


class EmptyGrammar(GrammarError):
    """A grammar that no text follows, because it contradicts itself. `why`: a clause, if it is known."""

    def __init__(self, why: str = "") -> None:
        super().__init__(f"it allows no text{': ' if why else ''}{why}")


class NotEnforceable(GrammarError):
    """A right schema with a part that no grammar holds, of any backend."""


class InternalError(SrvError):
    """A bug in `srv` itself."""


class IntegrityError(InternalError):
    """Pages, slots or locks do not add up: for example free + cached + held != total, or a page was freed twice."""


class EngineDead(InternalError):
    """The engine process has ended, or does not answer."""


class RankLost(EngineDead):
    """A rank has ended, does not answer, or returned another result than the others; the engine cannot go on."""


def startup_failure(error: Exception) -> tuple[list[str], int]:
    """What a process that could not start reports: complete messages for the operator, and the exit status.

    The status is 2 if the operator can fix the cause, and 1 for a bug in `srv`.
    """
    if isinstance(error, StartError):
        return error.lines, error.status
    if isinstance(error, Refusal):
        return [str(rejected) for rejected in error.rejections], 2
    if isinstance(error, SrvError) and not isinstance(error, InternalError):
        return [str(error)], 2
    if is_out_of_host_memory(error):
        detail = str(error).partition("\n")[0] or type(error).__name__
        return [
            f"the engine could not start: this process can have no more host memory ({detail}). "
            "Free memory, raise the limit that was set for the process (ulimit -v shows it; or that of its container), "
            "or make the KV pool smaller with --max-total-tokens. [out_of_memory]"
        ], 2
    return [f"the engine could not start: {type(error).__name__}: {error}"], 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the host or of a device ran out.

    A device raises torch.OutOfMemoryError, or a RuntimeError that says so.
    """
    by_class = any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__)
    by_message = isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    return by_class or by_message or is_out_of_host_memory(error)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether host memory was exhausted: Python and numpy raise MemoryError; torch, a RuntimeError with this text."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))

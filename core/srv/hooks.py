"""The hooks of `srv`: what a plugin may observe, and what it may add. Specifications for pluggy, and nothing else.

    [project.entry-points."srv.hooks"]
    audit = "srv_audit:Audit"

The entry point names a class (it is instantiated once per process, without arguments), an object or a module. What it
implements is marked with `hookimpl`, and may leave out parameters that it does not read. Events are values: a plugin
never receives objects that `srv` works with. docs/hooks.md is the guide; `srv.platform.hook_plugins` loads plugins and
calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pluggy

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.routing import BaseRoute

hookspec = pluggy.HookspecMarker("srv")
hookimpl = pluggy.HookimplMarker("srv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a plugin is given before any other hook of a process. `arguments`: the values of its own arguments, as an
    instance of the declaration that `srv_arguments` returned; None if it declared none."""

    process: Literal["api", "engine"]
    arguments: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStarted:
    """The API process sends a request to the engine. A client request with several prompts or outputs is several.

    `id`: the client's request id, a number, and the position of the output. `max_tokens`: 0 for an embedding.
    `time`: seconds since the epoch.
    """

    id: str
    prompt_tokens: int
    max_tokens: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The first token of a request has arrived, `seconds` after the client's request."""

    id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request has ended: `reason` is stop, length, abort or error, and embeddings end with stop.

    `completion_tokens`: those that were returned to the client. `seconds`: since the client's request.
    """

    id: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An HTTP request was refused, or an argument at launch.

    `what`: the field of the request, or the argument; None if it is no single one. `status`: the HTTP status; None at
    launch.
    """

    code: str
    what: str | None
    status: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStarted:
    """The engine is ready. `pages`: usable pages per cache group."""

    model: str
    device: str
    pages: tuple[int, ...]
    page_size: int
    max_request_tokens: int
    load_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStopped:
    """The engine ends: `reason` is "stopped", or says what the engine has lost."""

    reason: str


class Step(NamedTuple):
    """One step of the engine. A step that failed is not reported. (A named tuple: one is created per step.)

    `tokens`: positions computed, of prompts and outputs. `generated`: tokens sampled and accepted, and those that a
    grammar forced. `seconds`: from its submission until its result was there; by default the next step is submitted
    meanwhile, so steps overlap.
    """

    step: int
    rows: int
    tokens: int
    generated: int
    seconds: float


# ---- once per process, before anything is served. What these raise stops the start, with the plugin's name.


@hookspec(firstresult=True)
def srv_arguments() -> type[NamedTuple] | None:
    """Declare arguments: a NamedTuple whose fields are `Annotated[type, srv.args.spec.Arg(...)]` with defaults.

    Each gets a flag, an environment variable, a key of the configuration file, a line of the help, and provenance.
    `srv plan` and `srv args` call this, too.
    """


@hookspec
def srv_setup(setup: Setup) -> None:
    """Prepare for this process. Not called if a launch is refused, because there are no values then."""


@hookspec(firstresult=True)
def srv_routes() -> Sequence[BaseRoute] | APIRouter | None:
    """Add routes to the HTTP server. They need the API key, and may not match a path that exists already."""


# ---- observers. What these raise is logged, and switches the plugin off until the process ends.


@hookspec
def srv_request_started(event: RequestStarted) -> None:
    """In the API process, which waits for it: return soon."""


@hookspec
def srv_first_token(event: FirstToken) -> None:
    """In the API process. Not called for embeddings."""


@hookspec
def srv_request_finished(event: RequestFinished) -> None:
    """In the API process, for each request that was started, whatever ended it."""


@hookspec
def srv_refused(event: Refused) -> None:
    """In the API process: an HTTP request, or each refused argument of a launch."""


@hookspec
def srv_engine_started(event: EngineStarted) -> None:
    """In the engine process."""


@hookspec
def srv_step(event: Step) -> None:
    """In the engine process, between two steps: what it takes is added to each step."""


@hookspec
def srv_engine_stopped(event: EngineStopped) -> None:
    """In the engine process. Not called if the process is killed."""

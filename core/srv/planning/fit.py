"""The answers of `srv plan --fit`: the largest launch that serves a model, found with the plan itself.

    context      the most tokens that one request may have
    concurrency  the most requests that run at once, each as long as the context
    devices      the fewest devices that serve one request as long as the context
    card         every profile of every platform that does

Each candidate is planned like any launch and counts as served if the pool of that plan holds its requests, so an answer
is true as far as plans are. The next candidate is refused, and the answer says why. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from typing import NamedTuple, Self, TypeAlias

from srv.args.statement import Origin, UserInput, UserStatement
from srv.errors import ModelError, Refusal, Rejection
from srv.limits import SMALLEST_REQUEST
from srv.memory.groups import PageGroup, window_pages
from srv.models.facts.sharding import MAX_LISTED_RANKS
from srv.planning.plan import LaunchPlan, make_plan
from srv.planning.pools import most_unconfirmed_tokens
from srv.planning.resolution import find_the_model, model_fault
from srv.planning.steps import draft_count, step_depth
from srv.planning.target import find_target
from srv.platform.registry import find_platforms

GOALS = ("context", "concurrency", "devices", "card")
SOURCE = "srv plan --fit"
Make: TypeAlias = Callable[[UserInput], LaunchPlan]

_ARGUMENTS = {"context": "context_length", "concurrency": "max_running_requests"}
_INDIVISIBLE = "not_divisible"  # the model cannot be divided among so many ranks, but perhaps among more
_MORE_DEVICES_HELP = {"pool_too_small", _INDIVISIBLE}
_REMEDY = (
    "Choose a shorter --context-length, an int8 KV pool with --kv-cache-dtype, more devices with --tp-size, or a device"
    " with more memory."
)
_FEWEST = {"context": SMALLEST_REQUEST, "concurrency": 1}


class Trial(NamedTuple):
    """A candidate: its plan and how its pool holds the requests, or (`plan` None) why it is not served."""

    plan: LaunchPlan | None
    lines: tuple[str, ...]
    rejections: tuple[Rejection, ...] = ()


class FittedCard(NamedTuple):
    """Whether one profile of a platform serves the model, and how or why not."""

    device: str
    memory_bytes: int
    served: bool
    lines: tuple[str, ...]


class Fit(NamedTuple):
    """The answer to one goal, with the plan that it was found with.

    `answer`: tokens, requests or devices; None for cards. `refused`: the next candidate, and why it is refused (for
    devices, the one before); None if no other exists. `cards`: of the goal card, those that serve the model first, each
    kind by memory.
    """

    goal: str
    answer: int | None
    plan: LaunchPlan | None
    lines: tuple[str, ...]
    refused: tuple[int, tuple[str, ...]] | None = None
    cards: tuple[FittedCard, ...] = ()

    @property
    def found(self) -> bool:
        """Whether anything serves the model."""
        return self.answer is not None or any(card.served for card in self.cards)


def fit(user: UserInput, goal: str) -> Fit:
    """The answer for a goal of `GOALS`. Refusal, with what the smallest candidate is refused for, if there is none."""
    with ExitStack() as stack:
        try:
            model = stack.enter_context(find_the_model(user, needed=False))
        except ModelError as error:
            raise Refusal([model_fault(user, error)]) from error
        find = cache(find_target)  # a device is found, and perhaps probed, once, as the model is

        def plan(candidate: UserInput) -> LaunchPlan:
            return make_plan(candidate, find, lambda _: nullcontext(model))

        if goal == "card":
            return _cards(user, plan)
        if goal == "devices":
            return _devices(user, plan)
        argument, first = _ARGUMENTS[goal], _FEWEST[goal]

        def attempt(value: int) -> Trial:
            requests = value if goal == "concurrency" else 1
            return _attempt(_with(user, argument, value), plan, requests)

        return _largest(goal, first, attempt)


def _largest(goal: str, first: int, attempt: Callable[[int], Trial]) -> Fit:
    """The largest value that is served. Doubles it until one is refused, and bisects what lies between."""
    low, served = first, attempt(first)
    if served.plan is None:
        raise Refusal(served.rejections)
    high, refused = 2 * low, attempt(2 * low)
    while refused.plan is not None:
        low, served, high = high, refused, 2 * high
        refused = attempt(high)
    while high - low > 1:
        middle = (low + high) // 2
        trial = attempt(middle)
        if trial.plan is not None:
            low, served = middle, trial
        else:
            high, refused = middle, trial
    return Fit(goal, low, served.plan, served.lines, (high, refused.lines))


def _devices(user: UserInput, make: Make) -> Fit:
    """The fewest ranks, each with a device of its own. A device that is only described has as many as are needed."""
    text = user.value("device")
    described = text is not None and ":" in text and "count=" not in text
    before: tuple[int, tuple[str, ...]] | None = None
    faults: list[Rejection] = []
    for count in range(1, MAX_LISTED_RANKS + 1):
        device = f"{text},count={count}" if described else text
        trial = _attempt(_with(_with(user, "device", device), "tp_size", count), make, 1)
        if trial.plan is not None:
            return Fit("devices", count, trial.plan, trial.lines, before)
        codes = {rejection.code for rejection in trial.rejections}
        if codes == {_INDIVISIBLE}:
            continue
        before = (count, trial.lines)
        faults += trial.rejections
        if not codes <= _MORE_DEVICES_HELP:
            break
    raise Refusal(list(dict.fromkeys(faults)))


def _cards(user: UserInput, make: Make) -> Fit:
    """Every profile of every platform, or of the one that the user names; simulated ones only if they are named."""
    text = user.value("device") or ""
    if ":" in text or "," in text:
        remedy = "Name the platform alone, or leave out --device."
        reason = "every profile of a platform is tried as it is"
        raise Refusal([Rejection("bad_device", "device", text, SOURCE, reason, remedy)])
    wanted_card = text.strip().lower()
    ranks = user.value("tp_size") or 1
    devices = [
        (f"{name}:{profile}", device.memory_bytes)
        for name, platform in sorted(find_platforms().items())
        if platform.manifest is not None and (name == wanted_card or not (wanted_card or platform.manifest.simulated))
        for profile, device in platform.manifest.facts.profiles.items()
    ]
    trials = [
        (text, memory, _attempt(_with(user, "device", f"{text},count={ranks}"), make, 1)) for text, memory in devices
    ]
    cards = [FittedCard(text, memory, trial.plan is not None, trial.lines) for text, memory, trial in trials]
    if not cards:
        raise Refusal([_no_profiles(user)])
    return Fit(
        "card", None, None, (), cards=tuple(sorted(cards, key=lambda card: (not card.served, card.memory_bytes)))
    )


def _no_profiles(user: UserInput) -> Rejection:
    remedy = "Leave out --device, or name a platform that `srv platforms` lists."
    return Rejection("unknown_platform", "device", user.value("device"), SOURCE, "no profile matches it", remedy)


def _attempt(user: UserInput, make: Make, requests: int) -> Trial:
    """Plan, and check that the pool holds `requests` requests as long as the plan's context."""
    try:
        plan = make(user)
    except Refusal as refusal:
        return Trial(None, tuple(str(rejection) for rejection in refusal.rejections), refusal.rejections)
    if plan.refusals:
        return Trial(None, tuple(str(rejection) for rejection in plan.refusals), plan.refusals)
    if plan.model is None or plan.budget is None:
        return _refused(Rejection("no_model", "model_path", None, SOURCE, "no model is set", "Set --model-path."))
    config, model = plan.resolved.config, plan.model
    tokens = config.model.context_length or model.context_length
    groups = plan.budget.groups
    demands = [_Demand.of(plan, group, tokens, requests) for group in groups]
    lines = tuple(str(demand) for demand in demands)
    short = [line for line, group, demand in zip(lines, groups, demands, strict=True) if demand.total > group.pages]
    if short:
        breakdown = "; ".join(f"{name}: {sentence}" for name, sentence in plan.budget.breakdown)
        reason = f"{'; '.join(short)} ({breakdown})"
        return _refused(Rejection("pool_too_small", "KV pool", None, "memory budget", reason, _REMEDY))
    return Trial(plan, lines)


def _refused(rejection: Rejection) -> Trial:
    return Trial(None, (str(rejection),), (rejection,))


class _Demand(NamedTuple):
    """The pages that some requests hold in a group: `per_request`, and `filling` for the prompt of one of them."""

    group: PageGroup
    tokens: int
    requests: int
    per_request: int
    filling: int = 0

    @classmethod
    def of(cls, plan: LaunchPlan, group: PageGroup, tokens: int, requests: int) -> Self:
        """In a group with a window, one request at a time computes its prompt, as in the division of the pool."""
        whole = group.pages_for(tokens)
        if group.window is None or plan.model is None:
            return cls(group, tokens, requests, whole)
        config, size = plan.resolved.config, group.page_size
        per_request = window_pages(group.window, size, size, step_depth(config) * (1 + draft_count(config)))
        filling = -(-most_unconfirmed_tokens(config, plan.model) // size)
        if whole <= per_request:
            return cls(group, tokens, requests, whole)
        return cls(group, tokens, requests, per_request, filling)

    @property
    def total(self) -> int:
        """Pages; a prompt takes no more than the rest of a whole request."""
        return self.requests * self.per_request + min(
            self.filling, self.group.pages_for(self.tokens) - self.per_request
        )

    def __str__(self) -> str:
        one = self.requests == 1
        window = "" if self.group.window is None else f" with a window of {self.group.window}"
        pages = "" if one else f"{self.requests} x {self.per_request} = "
        if (prompt := self.total - self.requests * self.per_request) > 0:
            pages = f"{self.requests} x {self.per_request} + {prompt} of a prompt = "
        return (
            f"{self.requests} {'request' if one else 'requests'} of {self.tokens} tokens{window}"
            f" {'holds' if one else 'hold'} {pages}{self.total} pages of {self.group.page_size} tokens;"
            f" the pool has {self.group.pages}"
        )


def _with(user: UserInput, argument: str, value: object) -> UserInput:
    """The input with another value of one argument; None: with none."""
    others = [statement for statement in user.statements if statement.argument != argument]
    if value is not None:
        others.append(UserStatement(argument, value, Origin.COMMAND_LINE, SOURCE))
    return user._replace(statements=tuple(others))

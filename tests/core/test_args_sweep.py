"""Every argument, every value worth trying, every platform and variant: an answer or a refusal, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from args_world import model

from srv.args.cli import read_text
from srv.args.config import ARGUMENTS, SPELLINGS
from srv.args.spec import Argument
from srv.args.statement import Origin, UserInput, UserStatement
from srv.cli.survey import Target, make_target, resolve_for
from srv.errors import Refusal, Rejected
from srv.memory.budget import estimate
from srv.platform.registry import find_platforms

FOUND = {name: found for name, found in find_platforms().items() if found.error is None}
PROFILES = [(name, profile) for name, found in FOUND.items() for profile in found.loaded.facts.profiles]
BUILT_IN = {"cpu", "cuda", "rocm", "npu", "xpu"}
NUMBERS = ("-1", "0", "1", "2", "3", "64", "127", "128", "65535", "65536", "9" * 18, "-0.5", "0.5", "1.0", "1e9")
LISTS = ("1,2", "2,1", "default", "tse,1,2,3", "custom,1", "all", "q_proj", "a=b")
TEXTS = ("x", "auto", "{}", '{"a": 1}', "[]", "[1]", "/nowhere/x", " ")


def texts(argument: Argument) -> tuple[str, ...]:
    """Every choice; both booleans; boundaries of numbers and what lies beyond them; some texts for the rest."""
    if argument.kind.base is bool:
        return ("true", "false")
    if argument.choices:
        return (*argument.choices, "no-such-choice")
    if argument.kind.many:
        return (*LISTS, *NUMBERS[:5])
    if argument.kind.base in (int, float):
        return NUMBERS
    return (*TEXTS, *SPELLINGS.published.get(argument.name, ()))


@cache
def target(platform: str, profile: str) -> Target:
    manifest = FOUND[platform].loaded
    return make_target(manifest, manifest.facts.profiles[profile], "the test asks for it")


def said(argument: Argument, text: str) -> UserInput:
    read = read_text(argument, text, Origin.COMMAND_LINE, "command line")
    if isinstance(read, UserStatement):
        return UserInput((read,))
    return UserInput((), (read,))


def judged(argument: Argument, text: str, on: Target) -> tuple[Rejected, ...]:
    """The refusals of one value on one device; () if it is taken. Anything but an answer or a refusal is raised."""
    facts = model()
    try:
        resolved = resolve_for(said(argument, text), on, facts)
        estimate(resolved.config, facts, on.device, 0)
    except Refusal as refusal:
        return tuple(refusal.rejections)
    return ()


def faulty(refused: tuple[Rejected, ...]) -> list[str]:
    """Refusals that do not say code, what, why, and what to do."""
    return [
        str(each) for each in refused if not (each.code and each.what and each.reason and each.remedy.endswith("."))
    ]


def faults(arguments: Iterator[Argument], on: Target) -> list[str]:
    """What is wrong with the answers to every value of these arguments."""
    found: list[str] = []
    for argument in arguments:
        for text in texts(argument):
            found += [f"{argument.name}={text}: {fault}" for fault in faulty(judged(argument, text, on))]
    return found


def test_the_built_in_platforms_are_there() -> None:
    assert FOUND.keys() >= BUILT_IN
    for name, found in FOUND.items():
        assert set(found.loaded.variants) <= found.loaded.facts.profiles.keys(), name


@pytest.mark.parametrize(("platform", "profile"), PROFILES)
def test_implemented_arguments_get_an_answer_everywhere(platform: str, profile: str) -> None:
    implemented = (each for each in ARGUMENTS.values() if each.status == "implemented")
    assert faults(implemented, target(platform, profile)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "profile"), PROFILES)
def test_all_arguments_get_an_answer_everywhere(platform: str, profile: str) -> None:
    assert faults(iter(ARGUMENTS.values()), target(platform, profile)) == []


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=lambda argument: argument.name)
def test_every_value_gets_an_answer_and_no_planned_one_is_taken(argument: Argument) -> None:
    on = target("npu", "a3")
    for text in texts(argument):
        refused, given = judged(argument, text, on), said(argument, text).statements
        assert faulty(refused) == []
        if given and argument.why_planned(given[0].value):
            assert refused, f"{argument.name}={text} is taken in silence"


def test_nothing_set_is_taken_everywhere() -> None:
    for platform, profile in PROFILES:
        resolved = resolve_for(UserInput(), target(platform, profile), model())
        assert resolved.platform == platform

"""Every argument with many values on every platform and variant is accepted or refused, and never raises an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from args_world import CONFIG, model
from every import every

from srv.args.command_line import read_text
from srv.args.config import ARGUMENTS, SPELLINGS
from srv.args.spec import Argument
from srv.args.statement import Origin, UserInput, UserStatement
from srv.cli.main import main
from srv.errors import Refusal, Rejection
from srv.planning.budget import estimate
from srv.planning.resolution import resolve_arguments
from srv.planning.target import Target, make_target
from srv.platform.facts import FAMILIES
from srv.platform.registry import find_platforms

FOUND = {name: platform for name, platform in find_platforms().items() if platform.error is None}
PROFILES = [(name, profile) for name, platform in FOUND.items() for profile in platform.loaded.facts.profiles]
SWEPT = ("avx512", "sm90", "gfx942", "a2")
BUILT_IN = {"cpu", "cuda", "rocm", "npu", "xpu"}
BACKENDS = {  # all backends of all platforms, by family; each is unknown to the other platforms
    family: tuple(
        {spec.name: None for platform in FOUND.values() for spec in platform.loaded.facts.backends.get(family, ())}
    )
    for family in FAMILIES
}
NUMBERS = ("-1", "0", "1", "2", "3", "64", "127", "128", "65535", "65536", "9" * 18, "-0.5", "0.5", "1.0", "1e9")
LISTS = ("1,2", "2,1", "default", "tse,1,2,3", "custom,1", "all", "q_proj", "a=b")
TEXTS = ("x", "auto", "{}", '{"a": 1}', "[]", "[1]", "/nowhere/x", " ")


def texts(argument: Argument) -> tuple[str, ...]:
    """All choices and synonyms; both booleans; numbers at, below and above each boundary; sample strings otherwise."""
    if argument.kind.base is bool:
        return ("true", "false", "maybe")
    if argument.choices:
        return (*argument.choices, *(word for word, _ in argument.arg.synonyms), "no-such-choice")
    if argument.kind.many:
        return (*LISTS, *NUMBERS[:5])
    if argument.kind.base in (int, float):
        return tuple(dict.fromkeys((*boundaries(argument), *NUMBERS)))
    return (*TEXTS, *SPELLINGS.published.get(argument.name, ()), *BACKENDS.get(argument.arg.family or "", ()))


def boundaries(argument: Argument) -> Iterator[str]:
    """The boundaries in the schema of the argument's check, and the nearest numbers on either side."""
    schema = dict(argument.arg.check.schema) if argument.arg.check else {}
    schemas = [schema, *schema.get("anyOf", ())]
    keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const")
    actual = [part[keyword] for part in schemas for keyword in keywords if keyword in part]
    step = 1 if argument.kind.base is int else 1e-6
    for number in (*actual, *schema.get("enum", ())):
        yield from (f"{number + by:.9g}" for by in (-step, 0, step))


def test_boundaries_are_those_of_the_check() -> None:
    assert set(boundaries(ARGUMENTS["page_size"])) == {"0", "1", "2"}
    assert {"-2", "-1", "0", "1"} <= set(boundaries(ARGUMENTS["chunked_prefill_size"]))
    assert {"-1e-06", "1e-06", "0.999999", "1", "1.000001"} <= set(boundaries(ARGUMENTS["mem_fraction_static"]))
    unbounded = [
        argument.name
        for argument in ARGUMENTS.values()
        if argument.kind.base in (int, float)
        and not argument.kind.many
        and argument.arg.check
        and not tuple(boundaries(argument))
    ]
    assert unbounded == []


@cache
def target(platform: str, profile: str) -> Target:
    manifest = FOUND[platform].loaded
    return make_target(manifest, manifest.facts.profiles[profile], "the test selects it")


def said(argument: Argument, text: str) -> UserInput:
    read = read_text(argument, text, Origin.COMMAND_LINE, "command line")
    if isinstance(read, UserStatement):
        return UserInput((read,))
    return UserInput((), (read,))


def judged(argument: Argument, text: str, on: Target) -> tuple[Rejection, ...]:
    """The refusals of one value on one device; () if it is accepted. Any other error is raised."""
    facts = model()
    try:
        resolved = resolve_arguments(said(argument, text), on, facts)
        estimate(resolved.config, facts, on.device, 0)
    except Refusal as refusal:
        return tuple(refusal.rejections)
    return ()


def faulty(refused: tuple[Rejection, ...]) -> list[str]:
    """Refusals without a code, a subject, a reason or a remedy."""
    return [
        str(rejection)
        for rejection in refused
        if not (rejection.code and rejection.what and rejection.reason and rejection.remedy.endswith("."))
    ]


def faults(arguments: Iterator[Argument], on: Target) -> list[str]:
    """All incomplete refusals for all values of these arguments."""
    problems: list[str] = []
    for argument in arguments:
        for text in texts(argument):
            problems += [f"{argument.name}={text}: {fault}" for fault in faulty(judged(argument, text, on))]
    return problems


def test_built_in_platforms_are_installed() -> None:
    assert FOUND.keys() >= BUILT_IN
    for name, platform in FOUND.items():
        assert set(platform.loaded.variants) <= platform.loaded.facts.profiles.keys(), name


@pytest.mark.slow
@every(("platform", "profile"), {name: (name, profile) for name, profile in reversed(PROFILES)}.values())
def test_implemented_arguments_are_accepted_or_refused(platform: str, profile: str) -> None:
    implemented = (argument for argument in ARGUMENTS.values() if argument.status == "implemented")
    assert faults(implemented, target(platform, profile)) == []


def tier(profile: str) -> pytest.MarkDecorator:
    """Every argument takes half a minute on a device; other devices of a platform differ in a few rules."""
    return pytest.mark.slow if profile in SWEPT else pytest.mark.proof(minutes=0.3)


@pytest.mark.parametrize(("platform", "profile"), [pytest.param(*row, marks=tier(row[1])) for row in PROFILES])
def test_all_arguments_are_accepted_or_refused(platform: str, profile: str) -> None:
    assert faults(iter(ARGUMENTS.values()), target(platform, profile)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "profile"), [("cpu", "avx512"), ("cuda", "sm90")])
def test_plan_accepts_or_refuses_like_the_sweep(
    platform: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`srv plan` has exit status 0 or 2, with complete refusals in JSON; without arguments that open files.

    Two values are enough for planned arguments; the sweep tries all.
    """
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    on = ("plan", "--json", "--load-format=dummy", f"--model-path={tmp_path}", f"--device={platform}:{profile}")
    for argument in ARGUMENTS.values():
        if argument.name in ("device", "model_path", "load_format"):
            continue
        for text in texts(argument)[: 6 if argument.status == "implemented" else 2]:
            if argument.kind.base is bool:
                words = [argument.flag] if text == "true" else []
            else:
                words = [f"{argument.flag}={text}"]
            status = main([*on, *words])
            plan = json.loads(capsys.readouterr().out)
            assert status == (0 if plan["accepted"] else 2), words
            assert faulty(tuple(Rejection(**fields) for fields in plan.get("refusals", ()))) == [], words


@every("argument", ARGUMENTS.values(), ids=lambda argument: argument.name)
def test_no_planned_value_is_accepted(argument: Argument) -> None:
    on = target("npu", "a3")
    for text in texts(argument):
        statements = said(argument, text).statements
        if statements and argument.planned_reason(statements[0].value):
            refused = judged(argument, text, on)
            assert faulty(refused) == []
            assert refused, f"{argument.name}={text} is accepted"


def test_defaults_are_accepted_everywhere() -> None:
    for platform, profile in PROFILES:
        resolved = resolve_arguments(UserInput(), target(platform, profile), model())
        assert resolved.platform == platform

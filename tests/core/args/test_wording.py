"""Refusals name the flag that the user wrote, by whichever of the argument's names."""

from __future__ import annotations

import pytest
from args_world import manifest, resolved
from every import every

from srv.args.cli import add_arguments
from srv.args.config import ARGUMENTS, DEPRECATED
from srv.args.parser import Parser
from srv.args.sources import gather
from srv.args.spec import Argument
from srv.args.statement import UserInput
from srv.args.wording import names_used, reworded
from srv.errors import Refusal, Rejection
from srv.platform.facts import Support

ALIAS = next(name for name in ARGUMENTS["graph_max_batch_size"].spellings)
FLAG = "--" + ALIAS.replace("_", "-")
ALIASED = [argument for argument in ARGUMENTS.values() if len(argument.names) > 1 and argument.kind.base is not bool]
UNSUPPORTED = manifest(support=(Support("graph_max_batch_size", "unsupported", "graphs have one size"),))


def parse(*words: str, environment: dict[str, str] | None = None) -> UserInput:
    parser = Parser(prog="srv launch")
    add_arguments(parser)
    namespace, namespace_unknown = parser.parse_known_args(words)
    namespace.unknown = namespace_unknown
    return gather(namespace, environment or {})


def refusal(user: UserInput) -> str:
    with pytest.raises(Refusal) as raised:
        resolved(user, UNSUPPORTED)
    return str(raised.value)


def test_refusal_names_the_flag_that_was_used() -> None:
    assert refusal(parse(FLAG, "4")) == (
        f"graph_max_batch_size = 4 (set by command line with {FLAG}): graphs have one size "
        f"(constraint of platform imagined). Leave {FLAG} out. [unsupported]"
    )


def test_refusal_names_the_declared_flag() -> None:
    assert refusal(parse("--graph-max-batch-size", "4")) == (
        "graph_max_batch_size = 4 (set by command line): graphs have one size (constraint of platform imagined). "
        "Leave --graph-max-batch-size out. [unsupported]"
    )


def test_refusal_names_the_variable() -> None:
    variable = "SRV_" + ALIAS.upper()
    text = refusal(parse(environment={variable: "4"}))
    assert f"(set by environment {variable})" in text
    assert f"Leave {FLAG} out." in text


def test_name_of_the_highest_origin_is_used() -> None:
    text = refusal(parse("--graph-max-batch-size", "4", environment={"SRV_" + ALIAS.upper(): "4"}))
    assert "Leave --graph-max-batch-size out." in text


def test_refusal_of_another_argument_uses_the_users_name() -> None:
    user = parse("--graph-batch-sizes", "16", FLAG, "8", "--max-running-requests", "32")
    with pytest.raises(Refusal) as raised:
        resolved(user)
    (rejected,) = raised.value.rejections
    assert rejected.what == "graph_batch_sizes"
    assert rejected.reason == f"{ALIAS} is 8"
    assert rejected.remedy == f"Remove the larger sizes, or raise {ALIAS}."


def test_invalid_value_names_its_flag() -> None:
    (rejected,) = parse(FLAG, "many").rejections
    assert (rejected.what, rejected.who) == ("graph_max_batch_size", f"command line with {FLAG}")


def test_provenance_names_the_flag() -> None:
    story = resolved(parse(FLAG, "4")).provenance["graph_max_batch_size"]
    assert str(story).startswith(f"graph_max_batch_size = 4 because set by command line with {FLAG}")


@every("argument", ALIASED, ids=lambda argument: argument.name)
def test_every_alias_is_named(argument: Argument) -> None:
    for name, flag in zip(argument.names[1:], argument.flags[1:], strict=True):
        text = argument.choices[0] if argument.choices else "1"
        parsed = parse(flag, text)
        sources = [
            *(statement.source for statement in parsed.statements),
            *(rejection.who for rejection in parsed.rejections),
        ]
        assert name in argument.old_names or set(sources) == {f"command line with {flag}"}
        assert all(statement.name == name for statement in parsed.statements)


def test_a_negated_alias_is_an_alias() -> None:
    argument = next(
        candidate
        for candidate in ARGUMENTS.values()
        if candidate.kind.base is bool and candidate.spellings and not candidate.name.startswith("disable_")
    )
    negation = "--no-" + argument.spellings[0].replace("_", "-")
    (statement,) = parse(negation).statements
    assert (statement.name, statement.value, statement.source) == (
        argument.spellings[0],
        False,
        f"command line with {negation}",
    )


def test_deprecated_switch_is_not_an_alias() -> None:
    switch = next(
        replacement
        for replacement in DEPRECATED.values()
        if replacement.replaced_by and not replacement.replaced_by.same_as
    )
    assert names_used(parse(switch.flag).statements) == {}


def test_only_whole_names_are_replaced() -> None:
    rejection = Rejection("c", "a", None, "w", "page_size, page_sizes, my_page_size", "See --page-size, --page-size-x.")
    replaced = reworded(rejection, {"page_size": "block_length"})
    assert replaced.reason == "block_length, page_sizes, my_page_size"
    assert replaced.remedy == "See --block-length, --page-size-x."

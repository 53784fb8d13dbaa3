"""Refusals name the flag that the user wrote, whichever of an argument's names that is."""

from __future__ import annotations

import pytest
from args_world import manifest, resolved

from srv.args.cli import add_arguments
from srv.args.config import ARGUMENTS, DEPRECATED
from srv.args.parser import Parser
from srv.args.sources import gather
from srv.args.spec import Argument
from srv.args.statement import UserInput
from srv.args.wording import names_used, reworded
from srv.errors import Refusal, Rejected
from srv.platform.facts import Support

ALIAS = next(name for name in ARGUMENTS["graph_max_batch_size"].spellings)
FLAG = "--" + ALIAS.replace("_", "-")
ALIASED = [each for each in ARGUMENTS.values() if len(each.names) > 1 and each.kind.base is not bool]
UNSUPPORTED = manifest(support=(Support("graph_max_batch_size", "unsupported", "graphs have one size"),))


def said(*words: str, environment: dict[str, str] | None = None) -> UserInput:
    parser = Parser(prog="srv launch")
    add_arguments(parser)
    namespace, namespace_unknown = parser.parse_known_args(words)
    namespace.unknown = namespace_unknown
    return gather(namespace, environment or {})


def refusal(user: UserInput) -> str:
    with pytest.raises(Refusal) as raised:
        resolved(user, UNSUPPORTED)
    return str(raised.value)


def test_the_flag_that_was_used_is_who_set_it_and_what_to_leave_out() -> None:
    assert refusal(said(FLAG, "4")) == (
        f"graph_max_batch_size = 4 (set by command line with {FLAG}): graphs have one size "
        f"(platform imagined says so). Leave {FLAG} out. [unsupported]"
    )


def test_the_own_flag_is_named_as_before() -> None:
    assert refusal(said("--graph-max-batch-size", "4")) == (
        "graph_max_batch_size = 4 (set by command line): graphs have one size (platform imagined says so). "
        "Leave --graph-max-batch-size out. [unsupported]"
    )


def test_a_variable_has_its_name_too() -> None:
    variable = "SRV_" + ALIAS.upper()
    told = refusal(said(environment={variable: "4"}))
    assert f"(set by environment {variable})" in told
    assert f"Leave {FLAG} out." in told


def test_the_strongest_word_counts() -> None:
    told = refusal(said("--graph-max-batch-size", "4", environment={"SRV_" + ALIAS.upper(): "4"}))
    assert "Leave --graph-max-batch-size out." in told


def test_an_argument_that_another_refusal_speaks_of_has_the_users_name() -> None:
    user = said("--graph-batch-sizes", "16", FLAG, "8", "--max-running-requests", "32")
    with pytest.raises(Refusal) as raised:
        resolved(user)
    (rejected,) = raised.value.rejections
    assert rejected.what == "graph_batch_sizes"
    assert rejected.reason == f"{ALIAS} is 8"
    assert rejected.remedy == f"Give no larger size, or raise {ALIAS}."


def test_a_value_that_cannot_be_read_says_by_which_flag_it_came() -> None:
    (rejected,) = said(FLAG, "many").rejections
    assert (rejected.what, rejected.who) == ("graph_max_batch_size", f"command line with {FLAG}")


def test_stories_say_it_too() -> None:
    story = resolved(said(FLAG, "4")).stories["graph_max_batch_size"]
    assert str(story).startswith(f"graph_max_batch_size = 4 because set by command line with {FLAG}")


@pytest.mark.parametrize("argument", ALIASED, ids=lambda argument: argument.name)
def test_every_further_name_is_told(argument: Argument) -> None:
    for name, flag in zip(argument.names[1:], argument.flags[1:], strict=True):
        text = argument.choices[0] if argument.choices else "1"
        heard = said(flag, text)
        for each in (*(told.source for told in heard.statements), *(told.who for told in heard.rejections)):
            assert name in argument.old_names or each == f"command line with {flag}"
        assert all(told.name == name for told in heard.statements)


def test_a_negated_alias_is_an_alias() -> None:
    argument = next(
        each
        for each in ARGUMENTS.values()
        if each.kind.base is bool and each.spellings and not each.name.startswith("disable_")
    )
    negation = "--no-" + argument.spellings[0].replace("_", "-")
    (statement,) = said(negation).statements
    assert (statement.name, statement.value, statement.source) == (
        argument.spellings[0],
        False,
        f"command line with {negation}",
    )


def test_a_deprecated_switch_is_no_name_of_what_replaced_it() -> None:
    switch = next(each for each in DEPRECATED.values() if each.replaced_by and not each.replaced_by.same_as)
    assert names_used(said(switch.flag).statements) == {}


def test_only_whole_names_are_turned() -> None:
    given = Rejected("c", "a", None, "w", "page_size, page_sizes, my_page_size", "See --page-size, --page-size-x.")
    turned = reworded(given, {"page_size": "block_length"})
    assert turned.reason == "block_length, page_sizes, my_page_size"
    assert turned.remedy == "See --block-length, --page-size-x."

"""What a platform declares of arguments is law: the same words that the support matrix prints refuse a launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from args_world import manifest, resolved, user

from srv.args.config import ARGUMENTS
from srv.args.support import Said, on_variant, refusing, said_of_argument, said_of_value
from srv.errors import PluginError, Refusal
from srv.platform.checks import check_manifest
from srv.platform.facts import Support
from srv.platform.manifest import Manifest

POLICY = ARGUMENTS["schedule_policy"]


def declaring(*support: Support) -> Manifest:
    return manifest(support=support)


def test_an_unsupported_argument_is_refused_unless_it_has_its_default() -> None:
    platform = declaring(Support("schedule_policy", "unsupported", "the queue is in hardware"))
    assert resolved(user(schedule_policy="fcfs"), platform).config.schedule.schedule_policy == "fcfs"
    with pytest.raises(Refusal) as raised:
        resolved(user(schedule_policy="lpm"), platform)
    assert str(raised.value) == (
        "schedule_policy = lpm (set by command line): the queue is in hardware (platform imagined says so). "
        "Leave --schedule-policy out. [unsupported]"
    )


def test_a_declaration_may_speak_of_single_values_or_of_all_but_some() -> None:
    against = (Support("log_level", "unsupported", "too chatty", values=("debug",)),)
    only = (Support("log_level", "limited", "two suffice", only=("error",)),)
    level = ARGUMENTS["log_level"]
    assert said_of_value(level, "debug", against) == Said("unsupported", "too chatty")
    assert said_of_value(level, "error", against) is None
    assert said_of_value(level, "error", only) == Said("supported", "")
    assert said_of_value(level, "debug", only) == Said("unsupported", "two suffice")
    assert said_of_value(level, level.default, only) is None
    assert said_of_argument(against) == Said("limited", "too chatty")
    assert said_of_argument(only) == Said("limited", "two suffice")


def test_a_declaration_holds_on_its_variants_alone() -> None:
    said = (Support("schedule_policy", "unsupported", "no", variants=("mk2",)),)
    assert on_variant("mk1", said) == ()
    assert on_variant("mk2", said) == said
    platform = replace(declaring(*said), variants=("mk1",))
    assert resolved(user(schedule_policy="lpm"), platform).config.schedule.schedule_policy == "lpm"


def test_what_is_no_argument_refuses_nothing() -> None:
    assert refusing((Support("warp_factor", "unsupported", "no such thing"),)) == ()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"status": "perhaps"}, "perhaps"),
        ({"status": "unsupported"}, "is empty"),
        ({"status": "supported", "variants": ("mk7",)}, "mk7"),
        ({"status": "limited", "reason": "so", "values": (1,), "only": (2,)}, "both `values` and `only`"),
    ],
)
def test_a_bad_declaration_is_refused_when_the_plugin_loads(said: dict[str, Any], reason: str) -> None:
    with pytest.raises(PluginError, match=r"PlatformFacts\.support") as raised:
        check_manifest(declaring(Support("page_size", **said)), "imagined-platform", "1.0", "imagined")
    assert reason in str(raised.value)

"""A platform's support declarations: a launch refuses values with the same reason as the support matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from args_world import manifest, resolved, user
from every import every

from srv.args.config import ARGUMENTS
from srv.args.support import SupportStatus, constraints_from_support, on_variant, support_of_argument, support_of_value
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
        "schedule_policy = lpm (set by command line): the queue is in hardware (constraint of platform imagined). "
        "Leave --schedule-policy out. [unsupported]"
    )


def test_an_unsupported_value_that_another_setting_excludes_is_refused_once() -> None:
    """The exclusion advises to change the other setting, which would not help."""
    platform = declaring(Support("graph_batch_sizes", "unsupported", "a larger chip has it"))
    with pytest.raises(Refusal) as refused:
        resolved(user(graph_batch_sizes=(4, 16), disable_graphs=True), platform)
    (rejected,) = refused.value.rejections
    assert (rejected.what, rejected.code) == ("graph_batch_sizes", "unsupported")


def test_declaration_for_some_values_or_all_but_some() -> None:
    excluded = (Support("log_level", "unsupported", "too chatty", values=("debug",)),)
    only = (Support("log_level", "limited", "two suffice", only=("error",)),)
    level = ARGUMENTS["log_level"]
    assert support_of_value(level, "debug", excluded) == SupportStatus("unsupported", "too chatty")
    assert support_of_value(level, "error", excluded) is None
    assert support_of_value(level, "error", only) == SupportStatus("supported", "")
    assert support_of_value(level, "debug", only) == SupportStatus("unsupported", "two suffice")
    assert support_of_value(level, level.default, only) is None
    assert support_of_argument(excluded) == SupportStatus("limited", "too chatty")
    assert support_of_argument(only) == SupportStatus("limited", "two suffice")


def test_declaration_applies_only_to_its_variants() -> None:
    declared = (Support("schedule_policy", "unsupported", "no", variants=("mk2",)),)
    assert on_variant("mk1", declared) == ()
    assert on_variant("mk2", declared) == declared
    platform = replace(declaring(*declared), variants=("mk1",))
    assert resolved(user(schedule_policy="lpm"), platform).config.schedule.schedule_policy == "lpm"


def test_declaration_for_an_unknown_argument_refuses_nothing() -> None:
    assert constraints_from_support((Support("warp_factor", "unsupported", "no such thing"),)) == ()


@every(
    ("fields", "reason"),
    [
        ({"status": "perhaps"}, "perhaps"),
        ({"status": "unsupported"}, "is empty"),
        ({"status": "supported", "variants": ("mk7",)}, "mk7"),
        ({"status": "limited", "reason": "so", "values": (1,), "only": (2,)}, "both `values` and `only`"),
    ],
)
def test_a_bad_declaration_is_refused_when_the_plugin_loads(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PluginError, match=r"PlatformFacts\.support") as raised:
        check_manifest(declaring(Support("page_size", **fields)), "imagined-platform", "1.0", "imagined")
    assert reason in str(raised.value)

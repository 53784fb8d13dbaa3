"""The static contract checks: every invalid manifest is refused with the member, the reason and a remedy."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from every import every

from srv.errors import PluginError
from srv.platform import API_VERSION, OLDEST_API
from srv.platform.capabilities import CAPABILITIES, SINCE
from srv.platform.checks import check_backends, check_manifest
from srv.platform.facts import (
    BackendSpec,
    Constraint,
    Contribution,
    Default,
    DeviceFacts,
    OpSpec,
    PlatformFacts,
    Requires,
)
from srv.platform.manifest import Manifest, ProbeResult

DEVICE = DeviceFacts("one", 1 << 30, 1, "Example")
FACTS = PlatformFacts(lambda device: frozenset({"paged_kv"}), {"one": DEVICE})
OP = OpSpec("rotary", "plain", lambda device, call: None)
SPEC = BackendSpec("plain", 1, lambda context: Requires(), "package.module:Class", "page_token_head")
PART = Contribution("reserved_memory", "part", lambda context: 0, "so it is")
GOOD = Manifest(
    name="example",
    api=(2, 1),
    core=">=0.1,<1",
    variants=("one",),
    priority=3,
    summary="an example",
    facts=FACTS,
    probe=lambda context: ProbeResult(True, device=DEVICE),
    create=lambda context: None,  # type: ignore[arg-type, return-value]
)


def facts(**changes: Any) -> dict[str, Any]:
    return {"facts": replace(FACTS, **changes)}


def no_argument() -> ProbeResult:
    return ProbeResult(True, device=DEVICE)


def two_arguments(context: object, other: object) -> ProbeResult:
    return ProbeResult(True, device=DEVICE)


def test_a_good_manifest_passes_and_is_returned() -> None:
    assert check_manifest(GOOD, "srv-example", "1.0", "example") is GOOD


@every(
    ("changes", "member", "reason"),
    [
        ({"api": (1,)}, "Manifest.api", "(1,)"),
        ({"api": "2.0"}, "Manifest.api", "'2.0'"),
        ({"api": (3, 0)}, "Manifest.api", "3.0"),
        ({"api": (1, 3)}, "Manifest.api", "1.3"),
        ({"core": "newest"}, "Manifest.core", "is not a version specifier"),
        ({"core": ">=7"}, "Manifest.core", "works with srv >=7"),
        ({"name": "Example One"}, "Manifest.name", "is not a valid platform name"),
        ({"name": "sample"}, "Manifest.name", "'example'"),
        ({"variants": ["one"]}, "Manifest.variants", "['one']"),
        ({"variants": ()}, "Manifest.variants", "empty"),
        ({"variants": ("one", "two")}, "PlatformFacts.profiles", "no profile named 'two'"),
        ({"priority": "high"}, "Manifest.priority", "not of type int"),
        ({"priority": True}, "Manifest.priority", "not of type int"),
        ({"priority": -1}, "Manifest.priority", "-1"),
        ({"summary": " "}, "Manifest.summary", "empty"),
        ({"simulated": 1}, "Manifest.simulated", "not of type bool"),
        ({"options": "page_size"}, "Manifest.options", "'page_size'"),
        ({"probe": no_argument}, "Manifest.probe", "signature ()"),
        ({"probe": None}, "Manifest.probe", "not callable"),
        ({"create": two_arguments}, "Manifest.create", "signature (context"),
        ({"worker_env": lambda device: {}}, "Manifest.worker_env", "signature (device)"),
        ({"facts": {}}, "Manifest.facts", "not of type PlatformFacts"),
        (facts(capabilities=lambda: frozenset()), "PlatformFacts.capabilities", "signature ()"),
        (facts(capabilities=lambda device: {"paged_kv"}), "PlatformFacts.capabilities('one')", "frozenset"),
        (facts(capabilities=lambda device: frozenset({"paged"})), "PlatformFacts.capabilities('one')", "'paged'"),
        (facts(capabilities=lambda device: 1 / 0), "PlatformFacts.capabilities('one')", "ZeroDivisionError"),
        (facts(profiles={"one": DEVICE, "big": DeviceFacts("two", 1, 1)}), "PlatformFacts.profiles['big']", "'two'"),
        (facts(profiles={"one": DeviceFacts("one", 0, 1)}), "PlatformFacts.profiles['one']", "describes no device"),
        (facts(cards={"x100": DeviceFacts("two", 1, 1)}), "PlatformFacts.cards['x100']", "'two'"),
        (facts(cards={"X100": DEVICE}), "PlatformFacts.cards['X100']", "not in lower case"),
        (facts(defaults=[]), "PlatformFacts.defaults", "not of type tuple"),
        (facts(defaults=(SPEC,)), "PlatformFacts.defaults[0]", "not of type Default"),
        (facts(defaults=(Default("page_size", lambda: 1, "so"),)), "PlatformFacts.defaults[0].compute", "()"),
        (facts(defaults=(Default("page_size", lambda context: 1, ""),)), "PlatformFacts.defaults[0].reason", "empty"),
        (
            facts(contributions=(replace(PART, replaces="runtime"),)),
            "PlatformFacts.contributions[0].replaces",
            "is 'runtime'",
        ),
        (
            facts(contributions=(replace(PART, of_remaining=1),)),
            "PlatformFacts.contributions[0].of_remaining",
            "not of type bool",
        ),
        (
            facts(constraints=(Constraint("dtype", "bad", lambda context: None, ""),)),
            "PlatformFacts.constraints[0].remedy",
            "empty",
        ),
        (facts(ops=[OP]), "PlatformFacts.ops", "not of type tuple"),
        (facts(ops=(SPEC,)), "PlatformFacts.ops[0]", "not of type OpSpec"),
        (facts(ops=(replace(OP, name=""),)), "PlatformFacts.ops[0].name", "empty"),
        (facts(ops=(replace(OP, check=lambda call: None),)), "PlatformFacts.ops[0].check", "signature (call)"),
        (facts(ops=(replace(OP, fallback="yes"),)), "PlatformFacts.ops[0].fallback", "not of type bool"),
        (facts(ops=(OP, OP)), "PlatformFacts.ops[1]", "plain of rotary twice"),
        (
            facts(ops=(replace(OP, name="slow", fallback=True), OP)),
            "PlatformFacts.ops[1]",
            "plain comes after the fallback slow",
        ),
        (facts(backends={"weather": ()}), "backends['weather']", "is not a backend family"),
        (facts(backends={"attention": [SPEC]}), "backends['attention']", "not of type tuple"),
        (facts(backends={"attention": (SPEC, SPEC)}), "backends['attention']", "plain twice"),
    ],
)
def test_a_broken_manifest_is_refused(changes: dict[str, Any], member: str, reason: str) -> None:
    with pytest.raises(PluginError) as raised:
        check_manifest(replace(GOOD, **changes), "srv-example", "1.0", "example")
    error = raised.value
    assert error.distribution == "srv-example"
    assert error.member == member
    assert reason in error.reason
    assert error.remedy


@every(
    ("changes", "reason"),
    [
        ({"priority": 1.5}, "not of type int"),
        ({"target": "package.module.Class"}, "package.module.Class"),
        ({"kv_order": ""}, "empty"),
        ({"check": lambda: Requires()}, "signature ()"),
        ({"name": ""}, "empty"),
        ({"graphs": "yes"}, "not of type bool"),
        ({"lengths": "both"}, "'both'"),
        ({"fallback": 1}, "not of type bool"),
    ],
)
def test_a_broken_backend_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PluginError) as raised:
        check_backends("attention", (replace(SPEC, **changes),), "srv-example")
    assert reason in raised.value.reason


EXPERTS = OpSpec("experts", "plain", lambda device, call: None, "acme:experts")


@every(
    ("family", "ops", "member"),
    [
        ("moe", [EXPERTS], "backend moe plain: ops"),
        ("attention", (EXPERTS,), "backend attention plain: ops"),
        ("moe", (replace(EXPERTS, op="linear"),), "backend moe plain: ops[0].op"),
        ("moe", (replace(EXPERTS, name="other"),), "backend moe plain: ops[0].name"),
        ("moe", (replace(EXPERTS, target=""),), "backend moe plain: ops[0].target"),
        ("moe", (EXPERTS, EXPERTS), "backend moe plain: ops[1]"),
    ],
)
def test_broken_ops_of_an_added_backend_are_refused(family: str, ops: Any, member: str) -> None:
    experts = replace(SPEC, target="" if family == "moe" else SPEC.target)
    added = (replace(experts, ops=(EXPERTS,)),)
    assert family != "moe" or check_backends("moe", added, "srv-example") == added
    with pytest.raises(PluginError) as raised:
        check_backends(family, (replace(experts, ops=ops),), "srv-example")
    assert raised.value.member == member


def test_a_platform_has_the_ops_of_its_backends_in_one_place() -> None:
    spec = replace(SPEC, target="", ops=(EXPERTS,))
    with pytest.raises(PluginError, match=r"List them in PlatformFacts\.ops") as raised:
        check_manifest(replace(GOOD, **facts(backends={"moe": (spec,)})), "srv-example", "1.0")
    assert raised.value.member == "backend moe plain: ops"


def test_equal_priorities_within_a_family_are_refused() -> None:
    rival = replace(SPEC, name="other")
    with pytest.raises(PluginError, match="plain and other have the same priority 1"):
        check_backends("attention", (SPEC, rival), "srv-example")


def test_unknown_member_is_refused_with_the_nearest_known_one() -> None:
    @dataclass(frozen=True)
    class Larger(Manifest):
        simulate: bool = False

    larger = Larger(**{name: getattr(GOOD, name) for name in Manifest.__dataclass_fields__})
    with pytest.raises(PluginError, match="Did you mean simulated") as raised:
        check_manifest(larger, "srv-example", "1.0")
    assert raised.value.member == "Manifest.simulate"


def test_an_older_contract_version_keeps_working() -> None:
    """A srv that supports contract versions 2.4 to 3.1 accepts plugins for each of them, and no others."""
    for api in ((2, 4), (3, 0), (3, 1)):
        manifest = replace(GOOD, api=api)
        assert check_manifest(manifest, "srv-example", "1.0", api=(3, 1), oldest=(2, 4)) is manifest
    for api, remedy in (((3, 2), "Install a newer srv, "), ((2, 3), "Install a newer srv-example, ")):
        with pytest.raises(PluginError, match=remedy):
            check_manifest(replace(GOOD, api=api), "srv-example", "1.0", api=(3, 1), oldest=(2, 4))


@every(
    ("changes", "member"),
    [
        ({"capabilities": lambda device: frozenset({"overlap"})}, "PlatformFacts.capabilities('one')"),
        ({"backends": {"attention": (replace(SPEC, graphs=True),)}}, "backend attention plain: graphs"),
        ({"backends": {"attention": (replace(SPEC, lengths="device"),)}}, "backend attention plain: lengths"),
    ],
)
def test_a_feature_newer_than_the_declared_version_is_refused(changes: dict[str, Any], member: str) -> None:
    since = {"overlap": (2, 3), "BackendSpec.graphs": (2, 3), "BackendSpec.lengths": (2, 3)}
    older, fitting = (replace(GOOD, api=api, **facts(**changes)) for api in ((2, 2), (2, 3)))
    assert check_manifest(fitting, "srv-example", "1.0", api=(2, 3), since=since) is fitting
    without = replace(GOOD, api=(2, 2))
    assert check_manifest(without, "srv-example", "1.0", api=(2, 3), since=since) is without
    with pytest.raises(PluginError) as raised:
        check_manifest(older, "srv-example", "1.0", api=(2, 3), since=since)
    error = raised.value
    assert (error.member, error.code) == (member, "version")
    assert "of contract version 2.3, which is newer than Manifest.api 2.2" in error.reason
    assert "set api=(2, 3), or remove it" in error.remedy


def test_what_is_newer_than_the_oldest_version_has_a_name_of_the_contract() -> None:
    """A misspelt name in SINCE would let older plugins use what they were not checked for."""
    names = {*CAPABILITIES, *(f"BackendSpec.{field.name}" for field in fields(BackendSpec))}
    assert SINCE.keys() <= names
    assert all(OLDEST_API < since <= API_VERSION for since in SINCE.values())


def test_a_backend_that_another_distribution_adds_names_no_contract_version() -> None:
    added = (replace(SPEC, graphs=True, lengths="device"),)
    assert check_backends("attention", added, "srv-example") == added


def test_the_text_of_a_refusal() -> None:
    with pytest.raises(PluginError) as raised:
        check_manifest(replace(GOOD, api=(3, 7)), "srv-example", "4.2", api=(3, 1), core="0.1.0")
    assert str(raised.value) == (
        "plugin srv-example: Manifest.api: srv-example 4.2 was written for contract version 3.7, "
        "but this srv 0.1.0 supports 2.1 to 3.1. Install a newer srv, or an older srv-example"
    )

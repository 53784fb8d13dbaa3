"""Resolution: layers, order, stories, quantities, constraints, and refusals collected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from args_world import GIB, backend, both, device, fits, manifest, model, reader, resolved, user

from srv.args.resolve import resolve
from srv.args.seen import UndeclaredRead
from srv.args.statement import Layer, Origin, UserInput
from srv.errors import PluginError, Refusal, Rejected
from srv.platform.facts import Constraint, Contribution, Default, Seen


def rejections(*arguments: object, **named: object) -> dict[str, Rejected]:
    """The refusals of a resolution by what they are about."""
    with pytest.raises(Refusal) as refusal:
        resolved(*arguments, **named)  # type: ignore[arg-type]
    return {rejected.what: rejected for rejected in refusal.value.rejections}


def platform_default(argument: str, value: object, reason: str = "the platform likes it") -> Default:
    return Default(argument, lambda seen: value, reason)


def test_declared_default_holds_where_nobody_speaks() -> None:
    story = resolved().stories["page_size"]
    assert str(story) == "page_size = 1 because generic default"
    assert story.layer is Layer.GENERIC


def test_every_layer_outranks_the_ones_below_and_shadows_them() -> None:
    platform = manifest(
        backend("paged", check=fits({"page_size": (32, 64)})),
        defaults=(platform_default("page_size", 16, "its cache lines hold 16 tokens"),),
    )
    assert resolved(on=platform).config.memory.page_size == 32
    story = resolved(user(page_size=64), platform).stories["page_size"]
    assert str(story) == (
        "page_size = 64 because set by command line\n"
        "    shadowed: 64 because attention backend paged requires page_size 32 or 64\n"
        "    shadowed: 16 because its cache lines hold 16 tokens\n"
        "    shadowed: 1 because generic default"
    )


def test_platform_outranks_model_and_model_outranks_generic() -> None:
    assert resolved().stories["dtype"].layer is Layer.MODEL
    assert resolved().config.model.dtype == "bfloat16"
    platform = manifest(defaults=(platform_default("dtype", "float32"),))
    assert resolved(on=platform).config.model.dtype == "float32"
    assert resolved(on=platform).config.platform.kv_cache_dtype == "float32"


def test_command_line_goes_before_environment_and_file() -> None:
    cli, env, file = (
        user(origin, port=port)
        for origin, port in ((Origin.COMMAND_LINE, 1001), (Origin.ENVIRONMENT, 1002), (Origin.CONFIG_FILE, 1003))
    )
    assert resolved(both(file, env, cli)).config.server.port == 1001
    assert resolved(both(file, env)).config.server.port == 1002
    story = resolved(both(file, env, cli)).stories["port"]
    assert [said.value for said in story.shadowed] == [1002, 1003, 30000]


def test_auto_on_the_command_line_cancels_the_file_and_leaves_the_choice() -> None:
    said = both(user(dtype="auto"), user(Origin.CONFIG_FILE, dtype="float32"))
    assert resolved(said).config.model.dtype == "bfloat16"
    over = both(user(dtype="float16"), user(Origin.CONFIG_FILE, dtype="auto"))
    assert resolved(over).config.model.dtype == "float16"


def test_defaults_are_ordered_by_what_they_read() -> None:
    chain = (
        Default("max_prefill_tokens", reader("chunked_prefill_size"), "one chunk is enough", ("chunked_prefill_size",)),
        Default("chunked_prefill_size", reader("max_running_requests"), "one each", ("max_running_requests",)),
    )
    config = resolved(user(max_running_requests=7), manifest(defaults=chain)).config
    assert (config.schedule.max_prefill_tokens, config.schedule.chunked_prefill_size) == (7, 7)


def test_circle_of_defaults_names_its_members() -> None:
    circle = (
        Default("max_prefill_tokens", reader("chunked_prefill_size"), "r", ("chunked_prefill_size",)),
        Default("chunked_prefill_size", reader("max_prefill_tokens"), "r", ("max_prefill_tokens",)),
    )
    with pytest.raises(PluginError, match="circle") as error:
        resolved(on=manifest(defaults=circle))
    assert "max_prefill_tokens" in str(error.value)
    assert "chunked_prefill_size" in str(error.value)
    assert "platform imagined" in str(error.value)


def test_two_of_one_layer_that_disagree_are_refused_naming_both() -> None:
    platform = manifest(
        defaults=(platform_default("page_size", 8, "eight is nice"), platform_default("page_size", 4, "four is nice"))
    )
    rejected = rejections(None, platform)["page_size"]
    assert rejected.code == "defaults_disagree"
    assert "eight is nice" in rejected.reason
    assert "four is nice" in rejected.reason
    assert resolved(user(page_size=2), platform).config.memory.page_size == 2  # the user has decided


def test_reading_what_was_not_declared_is_the_plugins_fault() -> None:
    platform = manifest(defaults=(Default("page_size", reader("port"), "r"),))
    with pytest.raises(UndeclaredRead, match=r"platform imagined.*default of page_size.*reads port"):
        resolved(on=platform)


@pytest.mark.parametrize(
    ("default", "message"),
    [
        (Default("nothing", lambda seen: 1, "r"), "nothing is no argument"),
        (Default("page_size", lambda seen: 1, "r", ("nothing",)), "nothing is no argument"),
        (Default("page_size", lambda seen: 0, "r"), "must be at least 1"),
        (Default("page_size", lambda seen: "x", "r"), "is not a whole number"),
        (Default("page_size", lambda seen: 1 // 0, "r"), "ZeroDivisionError"),
    ],
)
def test_bad_default_of_a_plugin_is_reported_by_its_owner(default: Default, message: str) -> None:
    with pytest.raises(PluginError, match="platform imagined") as error:
        resolved(on=manifest(defaults=(default,)))
    assert message in str(error.value)


def test_contributions_are_summed_with_a_story_a_part() -> None:
    extra = Contribution("reserved_memory", "mailboxes", lambda seen: 3 * GIB, "peers write into them")
    plain = resolved().quantities["reserved_memory"]
    more = resolved(on=manifest(contributions=(extra,))).quantities["reserved_memory"]
    assert more.total == plain.total + 3 * GIB
    assert "mailboxes: 3.00 GiB (platform imagined) because peers write into them" in str(more)


def test_default_can_read_a_quantity() -> None:
    extra = Contribution("reserved_memory", "mailboxes", lambda seen: 8 * GIB, "peers write into them")
    fraction = resolved(on=manifest(contributions=(extra,))).config.memory.mem_fraction_static
    assert 0.4 < fraction < 0.5  # 8 of 16 GiB and a little more stay free
    assert resolved().config.memory.mem_fraction_static == 0.88


def test_the_reason_of_the_static_fraction_says_which_of_two_decided() -> None:
    """Of a platform without figures of its own, twelve in a hundred stay free even if the parts come to less."""
    extra = Contribution("reserved_memory", "mailboxes", lambda seen: 8 * GIB, "peers write into them")
    assert "12 % stays free" in resolved().stories["mem_fraction_static"].reason
    by_sum = resolved(on=manifest(contributions=(extra,))).stories["mem_fraction_static"]
    assert by_sum.reason == "reserved_memory stays free"


def test_a_platform_s_part_may_take_the_place_of_core_s() -> None:
    known = Contribution(
        "reserved_memory", "steps", lambda seen: 5 * GIB, "it was weighed", instead_of=("activations", "sampling")
    )
    plain = {part.name: part for part in resolved().quantities["reserved_memory"].parts}
    mine = {
        part.name: part for part in resolved(on=manifest(contributions=(known,))).quantities["reserved_memory"].parts
    }
    assert plain.keys() - mine.keys() == {"activations", "sampling"}
    assert mine.keys() - plain.keys() == {"steps"}
    unknown = replace(known, instead_of=("nothing",))
    with pytest.raises(PluginError, match="srv has no part nothing in it"):
        resolved(on=manifest(contributions=(unknown,)))


def test_shares_are_of_what_the_parts_before_leave() -> None:
    half = Contribution("reserved_memory", "half", lambda seen: 0.5, "half of it", of_rest=True)
    tenth = Contribution("reserved_memory", "tenth", lambda seen: 0.1, "a tenth", of_rest=True)
    fixed = Contribution("reserved_memory", "fixed", lambda seen: 4 * GIB, "four")
    total = device().memory_bytes
    before = resolved(on=manifest(contributions=(fixed,))).quantities["reserved_memory"].total
    after = resolved(on=manifest(contributions=(half, fixed, tenth))).quantities["reserved_memory"].total
    assert total - after == pytest.approx((total - before) * 0.5 * 0.9)
    with pytest.raises(PluginError, match="must lie between 0 and 1"):
        resolved(on=manifest(contributions=(replace(half, compute=lambda seen: 1.5),)))


@pytest.mark.parametrize(("quantity", "amount"), [("reserved_money", 1), ("reserved_memory", "much")])
def test_bad_contribution_is_the_plugins_fault(quantity: str, amount: object) -> None:
    bad = Contribution(quantity, "x", lambda seen: amount, "r")  # type: ignore[arg-type,return-value]
    with pytest.raises(PluginError, match="platform imagined"):
        resolved(on=manifest(contributions=(bad,)))


def pages_divide(seen: Seen) -> str | None:
    return f"pages of {seen['page_size']} do not divide 96" if 96 % seen["page_size"] else None


def test_constraint_refuses_whoever_set_the_value() -> None:
    law = Constraint("page_size", "odd_page", pages_divide, "Take a divisor of 96.")
    rejected = rejections(user(page_size=5), manifest(constraints=(law,)))["page_size"]
    assert (rejected.code, rejected.value, rejected.who) == ("odd_page", "5", "command line")
    platform = manifest(constraints=(law,), defaults=(platform_default("page_size", 7),))
    assert rejections(None, platform)["page_size"].who == "platform imagined"
    assert resolved(user(page_size=6), platform).config.memory.page_size == 6


def test_constraint_is_not_judged_on_a_value_already_refused() -> None:
    law = Constraint("page_size", "always", lambda seen: "never right", "Give up.", reads=("port",))
    assert set(rejections(user(port=0), manifest(constraints=(law,)))) == {"port"}


def test_all_refusals_are_collected() -> None:
    said = user(port=0, tp_size=2, context_length=5000, attention_backend="palin", page_size=0)
    found = rejections(said)
    assert {what: rejected.code for what, rejected in found.items()} == {
        "port": "bad_value",
        "tp_size": "planned",
        "context_length": "context_over_model",
        "attention_backend": "unknown_backend",
        "page_size": "bad_value",
    }
    assert all(rejected.reason and rejected.remedy and rejected.who == "command line" for rejected in found.values())


def test_refusals_of_reading_come_first_and_stay() -> None:
    unread = Rejected("bad_value", "port", "x", "command line", "it is no number", "Give int.")
    said = UserInput(user(page_size=0).statements, (unread,))
    assert list(rejections(said)) == ["port", "page_size"]


@pytest.mark.parametrize("name", ["tp_size", "dp_size", "pp_size", "trust_remote_code"])
def test_planned_argument_takes_its_default_only(name: str) -> None:
    default = resolved().config.get(name)
    assert resolved(user(**{name: default})).config.get(name) == default
    rejected = rejections(user(**{name: True if default is False else 2}))[name]
    assert rejected.code == "planned"
    assert "yet" in rejected.reason


def test_missing_capability_refuses_what_the_user_set_to_anything_else() -> None:
    platform = manifest(capabilities=frozenset({"bfloat16", "prefix_cache", "chunked_prefill", "overlap"}))
    assert rejections(user(page_size=16), platform)["page_size"].code == "capability_missing"
    assert resolved(user(page_size=1), platform).config.memory.page_size == 1


def test_capabilities_decide_defaults_and_refuse_what_contradicts_them() -> None:
    platform = manifest(capabilities=frozenset({"float32"}))
    config = resolved(on=platform).config
    assert config.memory.disable_radix_cache
    assert config.schedule.disable_overlap_schedule
    assert config.schedule.chunked_prefill_size == -1
    assert config.model.dtype == "float32"
    said = user(disable_radix_cache=False, disable_overlap_schedule=False, chunked_prefill_size=512, dtype="float16")
    found = rejections(said, platform)
    assert set(found) == {
        "disable_radix_cache",
        "disable_overlap_schedule",
        "chunked_prefill_size",
        "dtype",  # and not the type of the KV pool, which only follows from it
    }


def test_host_memory_caps_the_pool_in_the_open() -> None:
    platform = manifest(capabilities=frozenset({"host_memory", "bfloat16", "paged_kv", "chunked_prefill"}))
    made = resolved(user(max_running_requests=4, page_size=16), platform)
    assert made.config.memory.max_total_tokens == 2 * 4 * 1008
    assert "running requests" in made.stories["max_total_tokens"].reason
    assert resolved().config.memory.max_total_tokens is None


def test_model_gives_context_name_and_format() -> None:
    config = resolved().config.model
    assert (config.context_length, config.served_model_name, config.load_format) == (1000, "tiny", "safetensors")
    assert resolved(user(context_length=1000)).config.model.context_length == 1000
    assert rejections(user(context_length=1001))["context_length"].code == "context_over_model"


def test_format_must_be_there() -> None:
    assert rejections(user(load_format="gguf"))["load_format"].code == "format_not_there"
    bare = model(format="config")
    assert rejections(None, model=bare)["load_format"].code == "format_not_there"
    assert resolved(user(load_format="dummy"), model=bare).config.model.load_format == "dummy"


def test_larger_memory_takes_larger_chunks() -> None:
    sizes = [resolved(device=device(memory * GIB)).config.schedule.chunked_prefill_size for memory in (16, 40, 80)]
    assert sizes == [2048, 4096, 8192]


def test_without_model_what_depends_on_it_stays_open() -> None:
    config = resolved(model=None).config
    assert config.model.context_length is None
    assert config.model.dtype == "auto"


def test_without_platform_only_core_and_user_speak() -> None:
    made = resolve(user(page_size=16))
    assert made.config.memory.page_size == 16
    assert made.platform is None
    assert made.backends == {}


def test_platform_and_device_come_together() -> None:
    with pytest.raises(ValueError, match="come together"):
        resolve(UserInput(), manifest=manifest())


def test_device_has_the_story_of_its_choice() -> None:
    assert str(resolved(chosen_because="nothing else is here").stories["device"]) == (
        "device = imagined because nothing else is here"
    )
    assert resolved(user(device="imagined:mk1")).config.platform.device == "imagined:mk1"


def test_report_hides_secrets() -> None:
    told = resolved(user(api_key="s3cret")).describe()
    assert told["api_key"]["value"] == "(hidden)"
    assert "s3cret" not in str(told)
    assert told["page_size"] == {
        "value": 1,
        "layer": "generic",
        "owner": "srv",
        "because": "generic default",
        "shadowed": [],
    }


def test_resolving_twice_gives_the_same() -> None:
    said, platform = user(page_size=16), manifest()
    one, two = resolved(said, platform), resolved(said, platform)
    assert one.config == two.config
    assert one.stories == two.stories

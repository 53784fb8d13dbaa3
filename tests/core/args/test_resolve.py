"""Resolution: layers, order, provenance, quantities, constraints, and all refusals together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from args_world import CAPABLE, GIB, backend, both, device, fits, manifest, model, reader, resolved, user
from every import every

from srv.args.context import UndeclaredRead
from srv.args.resolve import resolve
from srv.args.statement import Layer, Origin, UserInput
from srv.errors import PluginError, Refusal, Rejection
from srv.platform.facts import Constraint, Contribution, Default, ResolutionContext


def rejections(*arguments: object, **named: object) -> dict[str, Rejection]:
    """The refusals of a resolution by their subject."""
    with pytest.raises(Refusal) as refusal:
        resolved(*arguments, **named)  # type: ignore[arg-type]
    return {rejected.what: rejected for rejected in refusal.value.rejections}


def platform_default(argument: str, value: object, reason: str = "it suits the platform") -> Default:
    return Default(argument, lambda context: value, reason)


def test_declared_default_is_used_if_nothing_is_set() -> None:
    provenance = resolved().provenance["page_size"]
    assert str(provenance) == "page_size = 1 because generic default"
    assert provenance.layer is Layer.GENERIC


def test_every_layer_overrides_the_lower_ones() -> None:
    platform = manifest(
        backend("paged", check=fits({"page_size": (32, 64)})),
        defaults=(platform_default("page_size", 16, "its cache lines hold 16 tokens"),),
    )
    assert resolved(on=platform).config.memory.page_size == 32
    provenance = resolved(user(page_size=64), platform).provenance["page_size"]
    assert str(provenance) == (
        "page_size = 64 because set by command line\n"
        "    overridden: 64 because attention backend paged requires page_size 32 or 64\n"
        "    overridden: 16 because its cache lines hold 16 tokens\n"
        "    overridden: 1 because generic default"
    )


def test_platform_overrides_model_and_model_overrides_generic() -> None:
    assert resolved().provenance["dtype"].layer is Layer.MODEL
    assert resolved().config.model.dtype == "bfloat16"
    platform = manifest(defaults=(platform_default("dtype", "float32"),))
    assert resolved(on=platform).config.model.dtype == "float32"
    assert resolved(on=platform).config.platform.kv_cache_dtype == "float32"


def test_a_default_of_the_platform_yields_to_a_setting_that_excludes_it() -> None:
    """The user did not set it, and could not leave it out."""
    platform = manifest(defaults=(platform_default("graph_batch_sizes", (1, 4)),), capabilities=CAPABLE | {"graphs"})
    assert resolved(on=platform).config.graphs.graph_batch_sizes == (1, 4)
    provenance = resolved(user(disable_graphs=True), platform).provenance["graph_batch_sizes"]
    assert (provenance.layer, provenance.value) == (Layer.GENERIC, None)
    actual = rejections(user(disable_graphs=True, graph_batch_sizes=(1, 4)), platform)
    assert actual["graph_batch_sizes"].code == "excluded"


def test_defaults_of_a_platform_that_exclude_each_other_are_refused() -> None:
    platform = manifest(
        defaults=(platform_default("graph_batch_sizes", (1, 4)), platform_default("disable_graphs", True)),
        capabilities=CAPABLE | {"graphs"},
    )
    assert rejections(on=platform)["graph_batch_sizes"].code == "excluded"


def test_command_line_overrides_environment_and_file() -> None:
    cli, env, file = (
        user(origin, port=port)
        for origin, port in ((Origin.COMMAND_LINE, 1001), (Origin.ENVIRONMENT, 1002), (Origin.CONFIG_FILE, 1003))
    )
    assert resolved(both(file, env, cli)).config.server.port == 1001
    assert resolved(both(file, env)).config.server.port == 1002
    provenance = resolved(both(file, env, cli)).provenance["port"]
    assert [statement.value for statement in provenance.overridden] == [1002, 1003, 30000]


def test_auto_on_the_command_line_cancels_the_value_of_the_file() -> None:
    user_input = both(user(dtype="auto"), user(Origin.CONFIG_FILE, dtype="float32"))
    assert resolved(user_input).config.model.dtype == "bfloat16"
    over = both(user(dtype="float16"), user(Origin.CONFIG_FILE, dtype="auto"))
    assert resolved(over).config.model.dtype == "float16"


def test_defaults_are_ordered_by_what_they_read() -> None:
    chain = (
        Default("max_prefill_tokens", reader("chunked_prefill_size"), "one chunk is enough", ("chunked_prefill_size",)),
        Default("chunked_prefill_size", reader("max_running_requests"), "one each", ("max_running_requests",)),
    )
    config = resolved(user(max_running_requests=7), manifest(defaults=chain)).config
    assert (config.schedule.max_prefill_tokens, config.schedule.chunked_prefill_size) == (7, 7)


def test_cycle_of_defaults_names_its_members() -> None:
    cycle = (
        Default("max_prefill_tokens", reader("chunked_prefill_size"), "r", ("chunked_prefill_size",)),
        Default("chunked_prefill_size", reader("max_prefill_tokens"), "r", ("max_prefill_tokens",)),
    )
    with pytest.raises(PluginError, match="cycle") as error:
        resolved(on=manifest(defaults=cycle))
    assert "max_prefill_tokens" in str(error.value)
    assert "chunked_prefill_size" in str(error.value)
    assert "platform imagined" in str(error.value)


def test_different_values_in_one_layer_are_refused_naming_both() -> None:
    platform = manifest(
        defaults=(
            platform_default("page_size", 8, "eight is better"),
            platform_default("page_size", 4, "four is better"),
        )
    )
    rejected = rejections(None, platform)["page_size"]
    assert rejected.code == "defaults_disagree"
    assert "eight is better" in rejected.reason
    assert "four is better" in rejected.reason
    assert resolved(user(page_size=2), platform).config.memory.page_size == 2  # the user decides


def test_undeclared_read_is_an_error_of_the_plugin() -> None:
    platform = manifest(defaults=(Default("page_size", reader("port"), "r"),))
    with pytest.raises(UndeclaredRead, match=r"platform imagined.*default of page_size.*reads port"):
        resolved(on=platform)


@every(
    ("default", "message"),
    [
        (Default("nothing", lambda context: 1, "r"), "nothing is neither an argument nor a quantity"),
        (Default("page_size", lambda context: 1, "r", ("nothing",)), "nothing is neither an argument nor a quantity"),
        (Default("page_size", lambda context: 0, "r"), "must be at least 1"),
        (Default("page_size", lambda context: "x", "r"), "is not an integer"),
        (Default("page_size", lambda context: 1 // 0, "r"), "ZeroDivisionError"),
    ],
)
def test_bad_default_of_a_plugin_is_reported_by_its_owner(default: Default, message: str) -> None:
    with pytest.raises(PluginError, match="platform imagined") as error:
        resolved(on=manifest(defaults=(default,)))
    assert message in str(error.value)


def test_contributions_are_summed_and_every_part_has_a_reason() -> None:
    extra = Contribution("reserved_memory", "mailboxes", lambda context: 3 * GIB, "peers write into them")
    plain = resolved().quantities["reserved_memory"]
    more = resolved(on=manifest(contributions=(extra,))).quantities["reserved_memory"]
    assert more.total == plain.total + 3 * GIB
    assert "mailboxes: 3.00 GiB (platform imagined) because peers write into them" in str(more)


def test_default_can_read_a_quantity() -> None:
    extra = Contribution("reserved_memory", "mailboxes", lambda context: 8 * GIB, "peers write into them")
    fraction = resolved(on=manifest(contributions=(extra,))).config.memory.mem_fraction_static
    assert 0.4 < fraction < 0.5  # 8 of 16 GiB and a little more stay free
    assert resolved().config.memory.mem_fraction_static == 0.88


def test_reason_of_the_static_fraction_says_which_rule_applied() -> None:
    """Without published figures, 12 % of the memory stays free even if the estimated parts are smaller."""
    extra = Contribution("reserved_memory", "mailboxes", lambda context: 8 * GIB, "peers write into them")
    assert "12 % stays free" in resolved().provenance["mem_fraction_static"].reason
    by_sum = resolved(on=manifest(contributions=(extra,))).provenance["mem_fraction_static"]
    assert by_sum.reason == "reserved_memory stays free"


def test_part_of_a_platform_can_replace_parts_of_core() -> None:
    replacement = Contribution(
        "reserved_memory", "steps", lambda context: 5 * GIB, "it was measured", replaces=("activations", "sampling")
    )
    plain = {part.name: part for part in resolved().quantities["reserved_memory"].parts}
    mine = {
        part.name: part
        for part in resolved(on=manifest(contributions=(replacement,))).quantities["reserved_memory"].parts
    }
    assert plain.keys() - mine.keys() == {"activations", "sampling"}
    assert mine.keys() - plain.keys() == {"steps"}
    unknown = replace(replacement, replaces=("nothing",))
    with pytest.raises(PluginError, match="srv has no part nothing of it"):
        resolved(on=manifest(contributions=(unknown,)))


def test_shares_are_relative_to_the_remaining_memory() -> None:
    half = Contribution("reserved_memory", "half", lambda context: 0.5, "half of it", of_remaining=True)
    tenth = Contribution("reserved_memory", "tenth", lambda context: 0.1, "a tenth", of_remaining=True)
    fixed = Contribution("reserved_memory", "fixed", lambda context: 4 * GIB, "four")
    total = device().memory_bytes
    before = resolved(on=manifest(contributions=(fixed,))).quantities["reserved_memory"].total
    after = resolved(on=manifest(contributions=(half, fixed, tenth))).quantities["reserved_memory"].total
    assert total - after == pytest.approx((total - before) * 0.5 * 0.9)
    with pytest.raises(PluginError, match="must be between 0 and 1"):
        resolved(on=manifest(contributions=(replace(half, compute=lambda context: 1.5),)))


@every(("quantity", "amount"), [("reserved_money", 1), ("reserved_memory", "much")])
def test_bad_contribution_is_an_error_of_the_plugin(quantity: str, amount: object) -> None:
    bad = Contribution(quantity, "x", lambda context: amount, "r")  # type: ignore[arg-type,return-value]
    with pytest.raises(PluginError, match="platform imagined"):
        resolved(on=manifest(contributions=(bad,)))


def pages_divide(context: ResolutionContext) -> str | None:
    return f"pages of {context['page_size']} do not divide 96" if 96 % context["page_size"] else None


def test_constraint_refuses_values_of_users_and_platforms() -> None:
    constraint = Constraint("page_size", "odd_page", pages_divide, "Choose a divisor of 96.")
    rejected = rejections(user(page_size=5), manifest(constraints=(constraint,)))["page_size"]
    assert (rejected.code, rejected.value, rejected.who) == ("odd_page", "5", "command line")
    platform = manifest(constraints=(constraint,), defaults=(platform_default("page_size", 7),))
    assert rejections(None, platform)["page_size"].who == "platform imagined"
    assert resolved(user(page_size=6), platform).config.memory.page_size == 6


def test_constraint_is_not_checked_on_a_refused_value() -> None:
    constraint = Constraint("page_size", "always", lambda context: "never right", "Give up.", reads=("port",))
    assert set(rejections(user(port=0), manifest(constraints=(constraint,)))) == {"port"}


def test_all_refusals_are_collected() -> None:
    user_input = user(port=0, pp_size=2, context_length=5000, attention_backend="palin", page_size=0)
    actual = rejections(user_input)
    assert {what: rejected.code for what, rejected in actual.items()} == {
        "port": "bad_value",
        "pp_size": "planned",
        "context_length": "context_over_model",
        "attention_backend": "unknown_backend",
        "page_size": "bad_value",
    }
    assert all(rejected.reason and rejected.remedy and rejected.who == "command line" for rejected in actual.values())


def test_refusals_of_parsing_come_first() -> None:
    unread = Rejection("bad_value", "port", "x", "command line", "it is not an integer", "Set it to an integer.")
    user_input = UserInput(user(page_size=0).statements, (unread,))
    assert list(rejections(user_input)) == ["port", "page_size"]


@every("name", ["nnodes", "pp_size"])
def test_planned_argument_accepts_only_its_default(name: str) -> None:
    default = resolved().config.get(name)
    assert resolved(user(**{name: default})).config.get(name) == default
    rejected = rejections(user(**{name: True if default is False else 2}))[name]
    assert rejected.code == "planned"
    assert "yet" in rejected.reason


def test_missing_capability_refuses_values_other_than_the_default() -> None:
    platform = manifest(capabilities=frozenset({"bfloat16", "prefix_cache", "chunked_prefill", "overlap"}))
    assert rejections(user(page_size=16), platform)["page_size"].code == "capability_missing"
    assert resolved(user(page_size=1), platform).config.memory.page_size == 1


def test_capabilities_determine_defaults_and_refuse_other_values() -> None:
    platform = manifest(capabilities=frozenset({"float32"}))
    config = resolved(on=platform).config
    assert config.memory.disable_radix_cache
    assert config.schedule.disable_overlap_schedule
    assert config.schedule.chunked_prefill_size == -1
    assert config.model.dtype == "float32"
    switches = {"disable_radix_cache": False, "disable_overlap_schedule": False}
    actual = rejections(user(**switches, chunked_prefill_size=512, dtype="float16"), platform)
    assert set(actual) == {
        "disable_radix_cache",
        "disable_overlap_schedule",
        "chunked_prefill_size",
        "dtype",  # but not kv_cache_dtype, which follows from it
    }


def test_host_memory_limits_the_pool_with_a_reason() -> None:
    platform = manifest(capabilities=frozenset({"host_memory", "bfloat16", "paged_kv", "chunked_prefill"}))
    result = resolved(user(max_running_requests=4, page_size=16), platform)
    assert result.config.memory.max_total_tokens == 2 * 4 * 1008
    assert "running requests" in result.provenance["max_total_tokens"].reason
    assert resolved().config.memory.max_total_tokens is None


def test_model_determines_context_name_and_format() -> None:
    config = resolved().config.model
    assert (config.context_length, config.served_model_name, config.load_format) == (1000, "tiny", "safetensors")
    assert resolved(user(context_length=1000)).config.model.context_length == 1000
    assert rejections(user(context_length=1001))["context_length"].code == "context_over_model"


def test_model_must_have_the_format() -> None:
    assert rejections(user(load_format="gguf"))["load_format"].code == "format_not_there"
    bare = model(format="config")
    assert rejections(None, model=bare)["load_format"].code == "format_not_there"
    assert resolved(user(load_format="dummy"), model=bare).config.model.load_format == "dummy"


def test_larger_memory_has_larger_chunks() -> None:
    sizes = [resolved(device=device(memory * GIB)).config.schedule.chunked_prefill_size for memory in (16, 40, 80)]
    assert sizes == [2048, 4096, 8192]


def test_without_model_values_that_depend_on_it_are_unset() -> None:
    config = resolved(model=None).config
    assert config.model.context_length is None
    assert config.model.dtype == "auto"


def test_without_platform_only_core_and_user_set_values() -> None:
    result = resolve(user(page_size=16))
    assert result.config.memory.page_size == 16
    assert result.platform is None
    assert result.backends == {}


def test_platform_and_device_must_be_passed_together() -> None:
    with pytest.raises(ValueError, match="pass manifest and device together"):
        resolve(UserInput(), manifest=manifest())


def test_provenance_of_the_device_is_the_reason_of_its_choice() -> None:
    assert str(resolved(chosen_because="nothing else is here").provenance["device"]) == (
        "device = imagined because nothing else is here"
    )
    assert resolved(user(device="imagined:mk1")).config.platform.device == "imagined:mk1"


def test_report_hides_secrets() -> None:
    report = resolved(user(api_key="s3cret")).describe()
    assert report["api_key"]["value"] == "(hidden)"
    assert "s3cret" not in str(report)
    assert report["page_size"] == {
        "value": 1,
        "layer": "generic",
        "owner": "srv",
        "because": "generic default",
        "shadowed": [],
    }


def test_resolution_is_deterministic() -> None:
    user_input, platform = user(page_size=16), manifest()
    one, two = resolved(user_input, platform), resolved(user_input, platform)
    assert one.config == two.config
    assert one.provenance == two.provenance

"""Conversions between engines: units, negations, and those that depend on other flags or the device."""

from __future__ import annotations

from every import every

from srv.args.dialects.conversions import convert
from srv.args.dialects.interface import ConversionInput, Converted, Outcome, Untranslatable
from srv.args.dialects.table import DialectRow
from srv.args.dialects.values import fraction_of, inverted, json_text, parse_integer, scaled, size_in_bytes, tokens
from srv.args.dialects.words import FALSE, TRUE

GIB = 2**30


def outcome(conversion: str, text: str, memory: int | None = None, /, **row: object) -> Outcome:
    """The outcome of a conversion; `others` are the other flags."""
    others = row.pop("others", {})
    converted = DialectRow(("--flag",), to="target", conversion=conversion, **row)  # type: ignore[arg-type]
    return convert(ConversionInput("--flag", text, converted, others, lambda: memory))  # type: ignore[arg-type]


def target(result: Outcome) -> str:
    """The text for the row's own argument."""
    assert isinstance(result, Converted), result
    return result.settings["target"]


def code(result: Outcome) -> str:
    assert isinstance(result, Untranslatable), result
    assert result.reason
    assert result.remedy.endswith((".", "?"))
    return result.code


@every("text", TRUE + FALSE)
def test_double_negation_of_a_switch(text: str) -> None:
    once = inverted(text)
    assert once is not None
    assert once == ("false" if text in TRUE else "true")
    assert inverted(once) == ("true" if text in TRUE else "false")


def test_a_switch_that_is_neither_is_refused() -> None:
    assert inverted("maybe") is None
    assert code(outcome("opposite", "maybe")) == "bad_value"


@every(
    ("text", "number"),
    [("4096", 4096), ("-5", -5), ("4GB", 4 * GIB), ("1.5GiB", 3 * GIB // 2), ("2m", 2**21), ("", None)],
)
def test_sizes(text: str, number: int | None) -> None:
    assert size_in_bytes(text) == number


@every(("text", "number"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1M", 2**20), ("k", None)])
def test_token_numbers(text: str, number: int | None) -> None:
    assert tokens(text) == number


@every(
    ("text", "factor", "result"),
    [
        ("2500", "0.001", "2.5"),
        ("60000000", "0.000001", "60"),
        ("5", "0.01", "0.05"),
        ("inf", "1", None),
        ("x", "1", None),
    ],
)
def test_scaling_is_decimal(text: str, factor: str, result: str | None) -> None:
    assert scaled(text, factor) == result


def test_integers() -> None:
    assert [parse_integer(text) for text in ("7", "-7", " 7 ", "7.0", "", "9" * 20)] == [7, -7, 7, None, None, None]


def test_fractions_are_rounded_down() -> None:
    assert fraction_of(GIB, 3 * GIB) == "0.3333"
    assert fraction_of(2 * GIB, 3 * GIB) == "0.6666"
    assert fraction_of(GIB, 2 * GIB) == "0.5"


def test_json_values_as_on_a_command_line() -> None:
    assert [json_text(value) for value in (True, [1, 2], "x", {"a": 1}, 0.5)] == ["true", "1,2", "x", '{"a": 1}', "0.5"]


def test_bytes_need_a_device() -> None:
    refused = outcome("memory_fraction", "1GiB")
    assert code(refused) == "needs_device_memory"
    assert isinstance(refused, Untranslatable)
    assert "--target" in refused.remedy


def test_bytes_become_a_fraction() -> None:
    assert target(outcome("memory_fraction", str(48 * GIB), 64 * GIB)) == "0.75"
    assert target(outcome("memory_fraction", f"-{16 * GIB}", 64 * GIB)) == "0.75"
    assert target(outcome("memory_left", "16384", 64 * GIB, factor="1048576")) == "0.75"


def test_more_bytes_than_the_device_has() -> None:
    assert code(outcome("memory_fraction", "65GiB", 64 * GIB)) == "bad_value"
    assert code(outcome("memory_fraction", "-65GiB", 64 * GIB)) == "bad_value"


def test_choices() -> None:
    values = {"warn*": {"log_level": "warning"}, "": {}, "*": {"log_level": "{}"}}
    for text, settings in (("WARN", {"log_level": "warning"}), ("", {}), ("Info", {"log_level": "Info"})):
        result = outcome("choice", text, values=values)
        assert isinstance(result, Converted)
        assert result.settings == settings
    refused = outcome("choice", "x", values={"a": {}, "": {}})
    assert code(refused) == "no_equivalent_value"
    assert isinstance(refused, Untranslatable)
    assert 'a, ""' in refused.remedy


def test_whole_scaling_rounds_up() -> None:
    assert target(outcome("whole_scale", "8", factor="1.073741824")) == "9"
    assert target(outcome("whole_scale", "3.5")) == "4"
    assert target(outcome("whole_scale", "4")) == "4"


def test_a_reserve_in_percent() -> None:
    assert target(outcome("reserve", "5")) == "1.05"
    assert target(outcome("reserve", "0")) == "1"


def test_templates_and_json_entries() -> None:
    assert target(outcome("filled", "24", template='{"a": %d, "b": %d}')) == '{"a": 24, "b": 24}'
    assert code(outcome("filled", '1}, "x": {', template='{"a": %d}')) == "bad_value"
    assert target(outcome("json_entry", '{"factor": 2}', template="rope_scaling")) == '{"rope_scaling": {"factor": 2}}'
    assert code(outcome("json_entry", "{", template="rope_scaling")) == "bad_value"


def test_only_one_member_of_a_list() -> None:
    assert target(outcome("only_one", "a")) == "a"
    assert code(outcome("only_one", "a,b")) == "one_only"


@every("text", ["a=/x,b=/y", '{"name": "a", "path": "/x"},{"name": "b", "path": "/y"}', '{"a": "/x", "b": "/y"}'])
def test_adapters(text: str) -> None:
    assert target(outcome("adapters", text)) == "a=/x,b=/y"


@every("text", ["{", '{"a": 1}', '{"a": ""}', '{"a": "x,y"}'])
def test_invalid_adapters(text: str) -> None:
    assert code(outcome("adapters", text)) == "bad_value"


def test_products() -> None:
    others = {"--tp": "4", "--dp": "2"}
    assert target(outcome("product", "true", partners=("--tp", "--dp"), others=others)) == "8"
    assert target(outcome("product", "100", partners=("--block=16",))) == "1600"
    assert target(outcome("product", "100", partners=("--block=16",), others={"--block": "32"})) == "3200"
    assert outcome("product", "false", partners=("--tp",), others=others) == Converted({})
    assert code(outcome("product", "true", partners=("--tp",), others={"--tp": "x"})) == "bad_value"
    assert target(outcome("unless_zero", "0", partners=("--tp", "--dp"), others=others)) == "8"
    assert target(outcome("unless_zero", "3", partners=("--tp", "--dp"), others=others)) == "3"


def test_replicas_of_a_world() -> None:
    assert target(outcome("replicas", "8", partners=("--tp",), others={"--tp": "4"})) == "2"
    assert target(outcome("replicas", "8", partners=("--tp",))) == "8"
    assert code(outcome("replicas", "8", partners=("--tp",), others={"--tp": "3"})) == "contradiction"
    assert code(outcome("replicas", "0", partners=("--tp",))) == "bad_value"


def test_nodes() -> None:
    partners = ("--world", "--tp", "--dp")
    assert target(outcome("nodes", "8", partners=partners, others={"--world": "16"})) == "2"
    assert target(outcome("nodes", "4", partners=partners, others={"--tp": "4", "--dp": "2"})) == "2"
    assert target(outcome("nodes", "8", partners=partners, others={"--world": "4"})) == "1"
    assert code(outcome("nodes", "3", partners=partners, others={"--world": "16"})) == "contradiction"
    assert code(outcome("nodes", "3", partners=partners, others={"--world": "x"})) == "bad_value"


def test_the_node_of_a_rank() -> None:
    others = {"--local": "8"}
    assert target(outcome("node_of_rank", "16", partners=("--local",), others=others)) == "2"
    assert target(outcome("node_of_rank", "0", partners=("--local",))) == "0"
    assert code(outcome("node_of_rank", "3", partners=("--local",), others=others)) == "one_start_a_node"
    assert code(outcome("node_of_rank", "8", partners=("--local",))) == "needs_flag"


def test_concurrency() -> None:
    partners = ("--batch", "--block")

    def convert_with(**others: str) -> Outcome:
        flags = {f"--{name}": text for name, text in others.items()}
        return outcome("concurrency", "32", partners=partners, others=flags)

    def settings(**others: str) -> object:
        result = convert_with(**others)
        return result.settings if isinstance(result, Converted) else result

    assert settings() == {"max_running_requests": "32"}
    assert settings(batch="0") == {"max_running_requests": "32"}
    assert settings(batch="8") == {"max_queued_requests": "24"}
    assert settings(batch="8", block="true") == {}
    assert settings(batch="32") == {}
    assert code(convert_with(batch="33")) == "contradiction"


def test_addresses() -> None:
    assert target(outcome("address", "10.0.0.1", partners=("--port=29501",))) == "10.0.0.1:29501"
    assert target(outcome("address", "::1", partners=("--port=1",), others={"--port": "7"})) == "[::1]:7"


def test_the_budget_of_a_step() -> None:
    assert outcome("step_budget", "8k", partners=("--cut",)) == Converted({"chunked_prefill_size": "8000"})
    uncut = outcome("step_budget", "8192", partners=("--cut",), others={"--cut": "false"})
    assert uncut == Converted({"max_prefill_tokens": "8192"})


def test_a_limit_of_whole_prompts() -> None:
    limited = Converted({"target": "9000"})
    assert outcome("whole_prompts", "9000", partners=("--cut",), others={"--cut": "-1"}) == limited
    cut = outcome("whole_prompts", "9000", partners=("--cut",), others={"--cut": "2048"})
    assert cut == Converted({}, "prompts are split, so that --cut 2048 limits those of a step")
    assert outcome("whole_prompts", "9000", partners=("--cut",)) == Converted(
        {}, "prompts are split, so that --cut limits those of a step"
    ), "the engine splits prompts if nothing is said"


def test_scattered_input() -> None:
    partners = ("--replicated", "--experts")
    assert outcome("scattered_input", "true", partners=partners) == Converted({"target": "true"})
    kept = outcome("scattered_input", "true", partners=partners, others={"--experts": "none"})
    assert kept == Converted({"target": "true"})
    for others in ({"--replicated": "true"}, {"--experts": "deepep"}):
        dropped = outcome("scattered_input", "true", partners=partners, others=others)
        assert isinstance(dropped, Converted)
        assert not dropped.settings
        assert "has no effect" in dropped.note


def test_with_partner() -> None:
    kept = outcome("with_partner", "true", partners=("--replicated",), others={"--replicated": "true"})
    assert kept == Converted({"target": "true"})
    for others in ({}, {"--replicated": "false"}):
        dropped = outcome("with_partner", "true", partners=("--replicated",), others=others)
        assert dropped == Converted({}, "it has no effect without --replicated")


def test_draft_tokens() -> None:
    by_lookup = outcome("draft_tokens", "3", partners=("method",), others={"method": "ngram"})
    assert isinstance(by_lookup, Converted)
    assert by_lookup.settings == {"speculative_num_draft_tokens": "4"}, "3 drafts, and the token before them"
    by_model = outcome("draft_tokens", "3", partners=("method",), others={"method": "eagle"})
    assert isinstance(by_model, Converted)
    assert by_model.settings == {
        "speculative_num_steps": "3",
        "speculative_eagle_topk": "1",
        "speculative_num_draft_tokens": "4",
    }
    assert code(outcome("draft_tokens", "0", partners=("method",))) == "bad_value"


FIELDS = {
    "size": DialectRow(("size",), to="page_size"),
    "tree": DialectRow(("tree",), refused="srv has no trees", remedy="Leave the key out."),
}


def test_json_objects() -> None:
    assert outcome("json_fields", '{"size": 16, "tree": null}', fields=FIELDS) == Converted({"page_size": "16"})
    assert code(outcome("json_fields", '{"tree": 1}', fields=FIELDS)) == "no_equivalent"
    unknown = outcome("json_fields", '{"sizes": 1}', fields=FIELDS)
    assert code(unknown) == "unknown_key"
    assert isinstance(unknown, Untranslatable)
    assert unknown.remedy == "Did you mean size?"
    assert code(outcome("json_fields", "[]", fields=FIELDS)) == "bad_value"


def test_harmless_value_is_not_refused() -> None:
    result = outcome("same", " None ", harmless=("none",), refused="srv has none", remedy="Leave it out.")
    assert result == Converted({}, "no setting is needed")


def test_flag_yields_to_another_flag() -> None:
    assert outcome("same", "1", yields_to="--other", others={"--other": "x"}) == Converted({}, "--other determines it")
    assert target(outcome("same", "1", yields_to="--other")) == "1"


def test_additional_settings() -> None:
    result = outcome("same", "1", also={"enable_trace": "true"})
    assert result == Converted({"target": "1", "enable_trace": "true"})

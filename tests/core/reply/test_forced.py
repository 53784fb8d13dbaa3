"""Grammars of calls: they allow what the format of the model is, and only that, and the parser reads it."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
from every import every
from transcripts import PARIS, SCHEMA, Transcript, events_of, merged, parser_of

from srv.errors import RequestError
from srv.grammar.backend import GrammarContext, JsonSpacing, Matcher
from srv.grammar.registry import make
from srv.grammar.relaxed import relaxed
from srv.grammar.source import GrammarSource, from_structural_tag
from srv.reply.formats import TOOL_NAMES, choose
from srv.reply.parser import ParserOptions
from srv.reply.rows import TaggedBody
from srv.reply.tools import Tool, ToolCalling, ToolUse
from srv.server.protocols.common.reply_reader import constrained
from srv.server.request.sampling_fields import Sampling
from srv.types import Vocabulary

END = 256
STRICT = {**SCHEMA, "required": ["city"], "additionalProperties": False}
WEATHER, NOW = Tool("weather", None, STRICT), Tool("now")
USE = ToolUse((WEATHER, NOW), ToolCalling.REQUIRED)
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>"]
CONTEXT = GrammarContext(Vocabulary(b"".join(TOKENS), list(map(len, TOKENS)), [END]), len(TOKENS), (END,))
BACKEND = make("llguidance", CONTEXT)
FORMATS = {name: choose(name, "none", []) for name in TOOL_NAMES if name != "none"}
FORCED = [name for name, row in FORMATS.items() if (row.channels or row.tools).frame[0]]  # type: ignore[union-attr]

TAGGED = [
    name for name in FORCED if any(isinstance(body, TaggedBody) for body in getattr(FORMATS[name].tools, "bodies", ()))
]
PYTHONIC = ["pythonic", "lfm2", "olmo3"]
BARE = {"gemma4": '<|"|>', "functiongemma": "<escape>"}  # the quotes of strings
WITHOUT_TRIGGER = ("pythonic", "llama3", "xlam", "gpt-oss")


def matcher(name: str, use: ToolUse) -> Matcher:
    constraint = FORMATS[name].constraint(use, 4)
    assert constraint is not None
    source = from_structural_tag(constraint.tag, param=constraint.param)
    result: Matcher = BACKEND.compile(BACKEND.translate(source, JsonSpacing()))()
    return result


def accepts(name: str, use: ToolUse, text: str) -> tuple[bool, bool]:
    """(whether the text is allowed, whether the reply may end behind it)."""
    state = matcher(name, use)
    return state.accept(list(text.encode())), state.accepting


def tagged(name: str, arguments: dict[str, Any]) -> str:
    """Arguments as a model writes them: strings as text, anything else as JSON."""
    row = FORMATS[name].tools
    assert row is not None
    body = next(body for body in row.bodies if isinstance(body, TaggedBody))
    newline, parts = "\n" if body.newline else "", []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "number"
        mark = body.raw if kind == "string" else body.json or body.raw.replace("string", kind)
        middle = f"{body.gap}{body.value}" if body.value else ""
        end = body.end.replace("{key}", key)
        parts.append(f"{body.gap}{body.key[0]}{key}{mark}{body.key[1]}{middle}{newline}{text}{newline}{end}")
    return "".join(parts)


def bare(quote: str, value: Any) -> str:
    """A value as the chat templates of Gemma write it: bare keys, and strings between quotes of their own."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(bare(quote, element) for element in value)}]"
        case dict():
            return f"{{{','.join(f'{key}:{bare(quote, member)}' for key, member in value.items())}}}"
    return json.dumps(value)


def call(name: str, tool: str, arguments: str) -> str:
    row = FORMATS[name].channels or FORMATS[name].tools
    assert row is not None
    begin, end = row.frame
    if name in TAGGED:
        arguments = tagged(name, json.loads(arguments))
    if name in BARE:
        arguments = bare(BARE[name], json.loads(arguments))[1:-1]
    if name in PYTHONIC:
        arguments = ", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(arguments).items())
    return f"{begin.replace('{name}', tool).replace('{index}', '4')}{arguments}{end}"


@every("name", FORCED)
def test_a_forced_reply_is_one_that_the_parser_reads(name: str) -> None:
    paris = call(name, "weather", json.dumps(PARIS))
    assert accepts(name, USE, paris) == (True, True)
    said = merged(events_of(parser_of(Transcript(name, "")), [paris]))
    arguments = json.dumps(PARIS, separators=(",", ":") if name in BARE else None)
    assert said == [("start", 0, "weather"), ("arguments", 0, arguments), ("end", 0, False)]
    assert accepts(name, USE, "Text")[0] is False
    assert accepts(name, USE, call(name, "weather", '{"days": 2}'))[0] is False, "city is required"
    named = ToolUse(USE.tools, ToolCalling.NAMED, "now")
    assert accepts(name, named, call(name, "now", "{}")) == (True, True)
    assert accepts(name, named, paris)[0] is False
    row = FORMATS[name].channels or FORMATS[name].tools
    assert row is not None
    assert accepts(name, USE, paris + paris)[0] is (not row.one_call)
    assert accepts(name, ToolUse(USE.tools, ToolCalling.REQUIRED, parallel=False), paris + paris)[0] is False


@every("name", FORCED)
def test_a_forced_call_that_is_cut_leaves_no_text(name: str) -> None:
    """Wherever the limit cuts it: what the grammar began before the arguments is nothing that the model said."""
    arguments = json.dumps(PARIS)
    reply = call(name, "weather", arguments)
    begins = None if name in (*TAGGED, *PYTHONIC, *BARE) else reply.index(arguments)
    for size in range(len(reply)):
        parser = FORMATS[name].parser(ParserOptions(USE), "")
        assert parser is not None
        events = merged(events_of(parser, reply[:size], cut=True))
        kinds = [event[0] for event in events]
        assert "text" not in kinds, (size, events)
        written = "".join(event[2] for event in events if event[0] == "arguments")
        if begins is None:
            assert (arguments.replace(" ", "") if name in BARE else arguments).startswith(written), (size, events)
        else:
            assert written == arguments[: max(0, size - begins)], (size, events)


PARTS = {
    "type": "object",
    "$defs": {"level": {"enum": [1, 2]}},
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "level": {"$ref": "#/$defs/level"},
        "days": {"type": "integer", "maximum": 9},
        "near": {"type": "array", "items": {"type": "string"}, "maxItems": 1},
        "note": {"type": ["string", "null"]},
        "gone": False,
    },
    "required": ["unit", "undeclared"],
    "additionalProperties": False,
}


@every("name", TAGGED)
@every(
    ("arguments", "allowed"),
    [
        ({"unit": "c", "undeclared": "any\ntext < 5"}, True),
        ({"unit": "c", "level": 2, "days": 9, "near": ["a"], "undeclared": ""}, True),
        ({"unit": "k", "undeclared": ""}, False),
        ({"unit": "c"}, False),
        ({"unit": "c", "level": 3, "undeclared": ""}, False),
        ({"unit": "c", "days": 10, "undeclared": ""}, False),
        ({"unit": "c", "near": ["a", "b"], "undeclared": ""}, False),
        ({"unit": "c", "gone": 1, "undeclared": ""}, False),
        ({"unit": "c", "undeclared": "", "more": "b"}, False),
    ],
)
def test_arguments_between_tags_follow_their_schema(name: str, arguments: dict[str, Any], allowed: bool) -> None:
    tool = Tool("weather", None, PARTS, strict=True)
    use = ToolUse((tool,), ToolCalling.REQUIRED)
    reply = call(name, "weather", json.dumps(arguments))
    assert accepts(name, use, reply) == (allowed, allowed)
    parser = FORMATS[name].parser(ParserOptions(use), "")
    assert parser is not None
    said = "".join(event[2] for event in merged(events_of(parser, [reply])) if event[0] == "arguments")
    assert json.loads(said) == arguments


@every(("name", "backend"), [("pythonic", "llguidance"), ("lfm2", "xgrammar"), ("olmo3", "llguidance")])
@every("required", [(), ("level",), ("unit", "days")])
def test_keyword_arguments_follow_their_schema(name: str, required: tuple[str, ...], backend: str) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    schema = {**PARTS, "required": list(required)}
    use = ToolUse((Tool("weather", None, schema, strict=True),), ToolCalling.REQUIRED)
    constraint = FORMATS[name].constraint(use, 4)
    assert constraint is not None
    grammar_backend = make(backend, CONTEXT)
    new = grammar_backend.compile(
        grammar_backend.translate(from_structural_tag(constraint.tag, param=constraint.param), JsonSpacing())
    )
    values = {"unit": "c", "level": 2, "days": 9, "near": ["a, b=1)]"], "note": None}
    order = sorted(values, key=lambda key: key not in required)
    for size in range(len(order) + 1):
        for keys in combinations(order, size):
            reply = call(name, "weather", json.dumps({key: values[key] for key in keys}))
            state = new()
            assert (state.accept(list(reply.encode())) and state.accepting) == (set(required) <= set(keys)), reply
    for key, wrong in (("unit", "k"), ("level", 3), ("days", 10), ("near", ["a", "b"]), ("more", 1)):
        reply = call(name, "weather", json.dumps({key: values.get(key) for key in required} | {key: wrong}))
        assert not new().accept(list(reply.encode()))
    parser = FORMATS[name].parser(ParserOptions(use), "")
    assert parser is not None
    said = merged(events_of(parser, [call(name, "weather", json.dumps(values))]))
    assert json.loads(next(event[2] for event in said if event[0] == "arguments")) == values


NESTED = {
    "type": "object",
    "$defs": {"place": {"type": "object", "properties": {"name": {"type": "string"}, "km": {"type": "integer"}}}},
    "properties": {
        "unit": {"enum": ["c", "f", 1]},
        "days": {"type": "integer", "maximum": 9},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "marks": {"type": "array", "items": {"type": ["number", "null"]}},
        "note": {"type": ["string", "null"]},
        "more": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "boolean"}]},
        "any": {},
        "free": {"type": "object"},
        "list": {"type": "array"},
    },
    "required": ["unit"],
    "additionalProperties": False,
}


@every("name", BARE)
@every("backend", ["llguidance", "xgrammar"])
def test_arguments_with_bare_keys_follow_their_schema(name: str, backend: str) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    use = ToolUse((Tool("weather", None, NESTED, strict=True),), ToolCalling.REQUIRED)
    constraint = FORMATS[name].constraint(use, 4)
    assert constraint is not None
    grammar_backend = make(backend, CONTEXT)
    new = grammar_backend.compile(
        grammar_backend.translate(from_structural_tag(constraint.tag, param=constraint.param), JsonSpacing())
    )

    def accepted(arguments: dict[str, Any]) -> bool:
        state = new()
        taken: bool = state.accept(list(call(name, "weather", json.dumps(arguments)).encode()))
        return taken and state.accepting

    for allowed in (
        {"unit": "c"},
        {"unit": 1, "days": 9, "near": [{"name": 'a}"b', "km": 2}, {"km": 3}, {}], "marks": [1.5, None], "note": None},
        {"unit": "f", "near": [], "marks": [], "note": "", "more": ["x, y:1]", ""]},
        {"unit": "c", "any": "x", "free": {"a": "b", "c-d": 1.5, "e": None}, "list": ["a", 1, True]},
        {"unit": "c", "any": False, "free": {}, "list": []},
        {"unit": "f", "marks": [-2], "note": "Zürich\n5 < 6", "more": True},
    ):
        assert accepted(allowed), allowed
        parser = FORMATS[name].parser(ParserOptions(use), "")
        assert parser is not None
        said = merged(events_of(parser, [call(name, "weather", json.dumps(allowed))]))
        assert json.loads(next(event[2] for event in said if event[0] == "arguments")) == allowed
    wrong = (
        {"unit": "k"},
        {"days": 1},
        {"unit": "c", "days": 10},
        {"unit": "c", "near": [{"m": 1}]},
        {"unit": 1, "x": 1},
    )
    for refused in (*wrong, {"unit": "c", "near": ["a"]}, {"unit": "c", "marks": ["a"]}, {"unit": "c", "more": [1]}):
        assert not accepted(refused), refused


def test_arguments_that_bare_keys_cannot_write_are_refused_by_name() -> None:
    for schema, part in (
        ({"type": "object", "properties": {"a b": {}}}, "a member 'a b', whose name cannot be written"),
        ({"enum": [["a"]]}, "lists values that cannot be written"),
        ({"$ref": "#"}, "has more than 300 values within each other"),
        ({"$ref": "#/$defs/none"}, "refers to what is not there"),
        ({"type": "any"}, "allows no value"),
    ):
        tool = Tool("f", None, {"type": "object", "properties": {"x": schema}})
        with pytest.raises(RequestError, match=f"the argument 'x' .*{part}") as caught:
            FORMATS["gemma4"].constraint(ToolUse((tool,), ToolCalling.REQUIRED), 0)
        assert caught.value.param == "tools.parameters"


def test_what_a_string_with_bare_keys_lacks_is_named() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "string", "pattern": "^a$"}}}}
    constraint = FORMATS["gemma4"].constraint(ToolUse((Tool("f", None, schema),), ToolCalling.REQUIRED), 0)
    assert constraint is not None
    assert constraint.left_out == ("pattern",)
    with pytest.raises(RequestError, match="'pattern' cannot be enforced"):
        FORMATS["gemma4"].constraint(ToolUse((Tool("f", None, schema, strict=True),), ToolCalling.REQUIRED), 0)


def test_schemas_of_arguments_with_bare_keys_may_have_references_that_are_repeated() -> None:
    place = {"type": "object", "properties": {"a": {"$ref": "#/$defs/1"}, "b": {"allOf": [{"$ref": "#/$defs/1"}]}}}
    schema = {
        "$defs": {"1": {"required": True, "type": "object", "properties": {"c": True}}},
        "properties": {"x": place},
    }
    constraint = FORMATS["gemma4"].constraint(ToolUse((Tool("f", None, schema),), ToolCalling.REQUIRED), 0)
    assert constraint is not None
    compiled(from_structural_tag(constraint.tag, param=constraint.param))


TREE = {
    "type": "object",
    "$defs": {"place": {"type": "object", "properties": {"name": {"type": "string"}, "km": {"type": "integer"}}}},
    "properties": {
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "best": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": ["number", "null"]}}},
        "sure": {
            "type": "object",
            "properties": {"unit": {"enum": ["c", "f"]}, "on": {"type": "boolean"}, "any": {}},
            "required": ["on", "unit"],
        },
        "note": {"type": ["string", "null"]},
        "few": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "free": {"type": "object"},
        "loop": {"type": "object", "properties": {"again": {"$ref": "#/properties/loop"}}},
    },
    "additionalProperties": False,
}
JSON_ARGUMENTS = ("few", "free", "loop")  # whose schemas tags cannot express


def in_tags(value: Any) -> str:
    """A value as the chat template of MiniMax M3 writes it."""
    match value:
        case dict():
            members = list(value.items())
        case list():
            members = [("item", element) for element in value]
        case str():
            return value
        case _:
            return json.dumps(value)
    return "".join(f"]<]minimax[>[<{key}>{in_tags(member)}]<]minimax[>[</{key}>" for key, member in members)


def minimax_call(arguments: dict[str, Any]) -> str:
    written = {key: json.dumps(value) if key in JSON_ARGUMENTS else value for key, value in arguments.items()}
    begin, end = FORMATS["minimax-m3"].tools.frame  # type: ignore[union-attr]
    return f"{begin.replace('{name}', 'weather')}{in_tags(written)}{end}"


TREES: list[dict[str, Any]] = [
    {},
    {"near": [{"name": "a]<b", "km": 2}, {"km": 3}, {}, {"name": ""}], "note": "5 < 6\n"},
    {"near": [], "best": None, "rows": [[1.5, None], [], [-2]], "sure": {"unit": "f", "on": True, "any": "é"}},
    {"best": {"km": 7}, "rows": [], "sure": {"unit": "c", "on": False}, "note": None},
    {"few": ["a", "b"], "free": {"x": [1, {"y": "z"}]}, "loop": {}},
]


@every("backend", ["llguidance", "xgrammar"])
@every("special", [False, True])
def test_arguments_of_nested_tags_follow_their_schema(backend: str, special: bool) -> None:
    """With the token before each tag in the vocabulary, as the model has it, and spelled byte by byte."""
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    use = ToolUse((Tool("weather", None, TREE),), ToolCalling.REQUIRED)
    constraint = FORMATS["minimax-m3"].constraint(use, 4)
    assert constraint is not None
    mark = b"]<]minimax[>["
    tokens = [*TOKENS, mark]
    vocabulary = Vocabulary(b"".join(tokens), list(map(len, tokens)), [END, END + 1])
    grammar_backend = make(backend, GrammarContext(vocabulary, len(tokens), (END,)) if special else CONTEXT)
    new = grammar_backend.compile(
        grammar_backend.translate(from_structural_tag(constraint.tag, param=constraint.param), JsonSpacing())
    )

    def accepted(text: str) -> bool:
        state, parts = new(), text.encode().split(mark)
        ids = list(parts[0])
        for part in parts[1:]:
            ids += [*([END + 1] if special else mark), *part]
        return state.accept(ids) and state.accepting

    for allowed in TREES:
        assert accepted(minimax_call(allowed)), allowed
    for refused in (
        {"near": ["a"]},
        {"near": [{"m": 1}]},
        {"near": [{"km": "x"}]},
        {"best": "x"},
        {"rows": [1]},
        {"sure": {"unit": "k", "on": True}},
        {"sure": {"unit": "c"}},
        {"few": ["a", "b", "c"]},
        {"free": [1]},
        {"more": 1},
    ):
        assert not accepted(minimax_call(refused)), refused


@every("arguments", TREES)
def test_nested_tags_say_what_was_called_however_they_are_cut(arguments: dict[str, Any]) -> None:
    use = ToolUse((Tool("weather", None, TREE),), ToolCalling.REQUIRED)
    reply = minimax_call(arguments)
    for at in range(len(reply)):
        parser, cut = (FORMATS["minimax-m3"].parser(ParserOptions(use), "") for _ in range(2))
        assert parser is not None
        assert cut is not None
        said = merged(events_of(parser, [reply[:at], reply[at:]]))
        assert [event[0] for event in said] == ["start", "arguments", "end"]
        assert json.loads(said[1][2]) == arguments
        assert "text" not in [event[0] for event in merged(events_of(cut, [reply[:at]], cut=True))]


def test_an_argument_may_be_named_like_other_tags() -> None:
    for name in ("invoke", "item", "parameter"):
        schema = {"type": "object", "properties": {name: {"type": "string"}, "x": {"type": "integer"}}}
        use = ToolUse((Tool("weather", None, schema),), ToolCalling.REQUIRED)
        reply = minimax_call({name: "a", "x": 1})
        assert accepts("minimax-m3", use, reply) == (True, True)
        parser = FORMATS["minimax-m3"].parser(ParserOptions(use), "")
        assert parser is not None
        said = merged(events_of(parser, [reply]))
        assert json.loads(said[1][2]) == {name: "a", "x": 1}, said


@every("name", [*TAGGED, *PYTHONIC])
def test_schemas_of_any_shape_have_a_grammar(name: str) -> None:
    properties = {"a": True, "b": {"anyOf": [True, {"type": "string"}]}, "c": {"$ref": "#"}, "d": {}}
    for schema in ({"properties": properties, "required": ["b"]}, {"required": False}, {}, {"required": ["z"]}):
        constraint = FORMATS[name].constraint(ToolUse((Tool("f", None, schema),), ToolCalling.REQUIRED), 0)
        assert constraint is not None
        source, _ = relaxed(from_structural_tag(constraint.tag, param=constraint.param), compiled)
        compiled(source)


def compiled(source: GrammarSource) -> object:
    return BACKEND.compile(BACKEND.translate(source, JsonSpacing()))


def test_an_argument_whose_name_cannot_be_written_is_refused() -> None:
    for name, argument in (
        *(("pythonic", "from"), ("lfm2", "a-b"), ("glm", "a>b"), ("kimi_k3", 'a"'), ("gemma4", "a:b")),
        *(("minimax-m3", "/a"), ("minimax-m3", "tool_call")),
    ):
        tool = Tool("f", None, {"type": "object", "properties": {argument: {}}})
        with pytest.raises(RequestError, match="has a name that a forced call of this model cannot have"):
            FORMATS[name].constraint(ToolUse((tool,), ToolCalling.REQUIRED), 0)


@every("name", TAGGED)
def test_what_tags_cannot_hold_is_refused_for_strict_tools_and_named_for_others(name: str) -> None:
    part = {"type": "string", "pattern": "^a$", "description": "An a."}
    schema = {"type": "object", "properties": {"x": part}, "required": ["x"], "minProperties": 1}
    constraint = FORMATS[name].constraint(ToolUse((Tool("f", None, schema),), ToolCalling.REQUIRED), 0)
    assert constraint is not None
    row = FORMATS[name].tools
    assert row is not None
    has_json = next(body for body in row.bodies if isinstance(body, TaggedBody)).raw  # a text may be a JSON string
    assert constraint.left_out == (("minProperties",) if has_json else ("minProperties", "pattern"))
    options = ParserOptions(ToolUse((Tool("f", None, schema),), ToolCalling.REQUIRED))
    source = constrained(Sampling(), FORMATS[name], options, "", 0).grammar
    assert source is not None
    assert source.left_out == constraint.left_out
    with pytest.raises(RequestError, match="'minProperties' cannot be enforced in calls of the format") as caught:
        FORMATS[name].constraint(ToolUse((Tool("f", None, schema, strict=True),), ToolCalling.REQUIRED), 0)
    assert caught.value.param == "tools.parameters"


@every("name", [*TAGGED, *BARE, "gigachat3", "cohere_command4"])
def test_xgrammar_forces_calls_too(name: str) -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    backend = make("xgrammar", CONTEXT)
    constraint = FORMATS[name].constraint(USE, 4)
    assert constraint is not None
    source = from_structural_tag(constraint.tag, param=constraint.param)
    new = backend.compile(backend.translate(source, JsonSpacing()))
    for tool, arguments, allowed in (("weather", PARIS, True), ("now", {}, True), ("weather", {"days": 2}, False)):
        state = new()
        assert (state.accept(list(call(name, tool, json.dumps(arguments)).encode())) and state.accepting) is allowed


@every("name", [name for name in FORCED if name not in WITHOUT_TRIGGER])
def test_strict_tools_leave_text_free(name: str) -> None:
    use = ToolUse((Tool("weather", None, STRICT, strict=True), NOW))
    assert accepts(name, use, "Just text.") == (True, True)
    assert accepts(name, use, "I look." + call(name, "weather", '{"city": "Paris"}')) == (True, True)
    assert accepts(name, use, call(name, "weather", '{"days": 2}'))[0] is False
    assert accepts(name, use, call(name, "now", '{"any": [1]}')) == (True, True)


@every("name", [*(name for name in FORMATS if name not in FORCED), *WITHOUT_TRIGGER])
def test_formats_without_such_a_grammar_say_so(name: str) -> None:
    uses = [ToolUse((Tool("now", strict=True),))] if name in FORCED else [USE, ToolUse((Tool("now", strict=True),))]
    for use in uses:
        with pytest.raises(RequestError, match=f"calls in the format {name} cannot be constrained") as caught:
            FORMATS[name].constraint(use, 0)
        assert caught.value.code == "not_implemented"


def test_a_reply_without_force_is_free() -> None:
    for use in (ToolUse(), ToolUse((NOW,)), ToolUse((Tool("now", strict=True),), ToolCalling.NONE)):
        assert FORMATS["qwen"].constraint(use, 0) is None


def test_grammars_begin_behind_the_reasoning() -> None:
    reply_format = choose("qwen", "qwen3", [])
    options = ParserOptions(USE)
    for prompt, begins_after in (("x<think>\n", "</think>"), ("x", ""), ("<think>\n\n</think>\n", "")):
        source = constrained(Sampling(), reply_format, options, prompt, 0).grammar
        assert source is not None
        assert source.begins_after == begins_after
        with_grammar = Sampling(grammar=from_structural_tag({"a": 1}, param="structural_tag"))
        later = constrained(with_grammar, reply_format, ParserOptions(), prompt, 0).grammar
        assert later is not None
        assert later.begins_after == begins_after
        with pytest.raises(RequestError, match="structural_tag is refused with tool_choice: both constrain"):
            constrained(with_grammar, reply_format, options, prompt, 0)

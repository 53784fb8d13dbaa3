"""Which format a server uses: by name, by the chat template of the model, from other distributions."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from every import every
from platform_plugins import write_plugin
from transcripts import USE, Transcript, events_of, merged

from srv.args.config import ARGUMENTS, make_config
from srv.errors import PluginError, RequestError
from srv.reply.checks import fault_of
from srv.reply.formats import REASONING_NAMES, REASONING_SYNONYMS, TOOL_NAMES, TOOL_SYNONYMS, choose
from srv.reply.parser import ParserOptions
from srv.reply.reasoning_rows import CHANNEL_ROWS, REASONING_ROWS
from srv.reply.rows import JsonBody, Marks, PythonBody, ReasoningFormat, ToolFormat
from srv.reply.tool_rows import TOOL_ROWS
from srv.reply.tools import Tool, ToolCalling, ToolUse

EXAMPLE = Path(__file__).resolve().parents[2] / "packages" / "srv_example_models"
# What chat templates of the models contain, shortened.
TEMPLATES = {
    "qwen2.5": (
        r"<tool_call></tool_call> {\"name\": <function-name>, \"arguments\": <args-json-object>} <|im_start|>",
        "qwen",
        None,
    ),
    "qwen3": (
        '<tool_call> {"name": , "arguments": } <tool_response> {{ "<think>\\n\\n</think>" }} enable_thinking',
        "qwen",
        "qwen3",
    ),
    "qwen3-coder": ("<tool_call>\\n<function=example>\\n<parameter=p>\\nv\\n</parameter>", "qwen3_coder", None),
    "qwen3.5": ("<tool_call>\\n<function=example>\\n<parameter=p>\\nv <think>\\n", "qwen3_coder", "qwen3"),
    "llama3.1": (
        '<|python_tag|> {"name": function name, "parameters": dictionary} "parameters" <|eot_id|>',
        "llama3",
        None,
    ),
    "llama4": ("<|python_start|><|python_end|> <|eot|>", "pythonic", None),
    "mistral": ("[AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]", "mistral", None),
    "magistral": ("[THINK][/THINK] [TOOL_CALLS][ARGS]", "mistral", "mistral"),
    "deepseek-v3": ("<｜tool▁calls▁begin｜><｜tool▁sep｜>\\n```json\\n", "deepseekv3", None),
    "deepseek-r1": ("<｜Assistant｜><think>\\n <｜tool▁sep｜> ```json", "deepseekv3", "deepseek-r1"),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁sep｜> {{'<｜Assistant｜>'}} {{ '<think>' }} {{'</think>'}}",
        "deepseekv31",
        "deepseek-r1",
    ),
    "glm": ("<tool_call>{n}\\n<arg_key>k</arg_key>\\n<arg_value> <think></think>", "glm", "glm45"),
    "kimi": ("<|tool_calls_section_begin|><|tool_call_begin|> <|im_middle|>", "kimi_k2", None),
    "kimi-thinking": ("<|tool_calls_section_begin|> <|im_middle|><think></think>", "kimi_k2", "kimi"),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "gpt-oss", "gpt-oss"),
    "minimax": ("<minimax:tool_call><invoke name= <think>", "minimax-m2", "minimax"),
    "granite3": ("<|start_of_role|>tool_response <|tool_call|>", "granite", None),
    "gemma4": ("<|tool_call>call: <tool_call|> <|channel>thought <channel|>", "gemma4", "gemma4"),
    "deepseek-v4": ("<｜DSML｜tool_calls> <think>", "deepseekv32", "qwen3"),
    "hy3": ("<tool_calls><tool_call>{n}<tool_sep> <arg_key> <arg_value> <think>", "hunyuan", "hunyuan"),
    "minimax-m3": ("]<]minimax[>[<tool_call> <mm:think>", "minimax-m3", "minimax-m3"),
    "kimi-k3": ("<|open|>think<|sep|> <|close|>think<|sep|>", "kimi_k3", "kimi_k3"),
    "apertus": ("<|tools_prefix|><|tools_suffix|> <|inner_prefix|>", "apertus", "apertus"),
    "functiongemma": ("<start_function_call>call:", "functiongemma", None),
    "plain": ("{% for message in messages %}{{ message.content }}{% endfor %}", None, None),
}


@every(("template", "tools", "reasoning"), TEMPLATES.values())
def test_the_chat_template_chooses(template: str, tools: str | None, reasoning: str | None) -> None:
    reply_format = choose(None, None, [template])
    rows = (
        (reply_format.channels, reply_format.channels)
        if reply_format.channels is not None
        else (reply_format.tools, reply_format.reasoning)
    )
    assert tuple(None if row is None else row.name for row in rows) == (tools, reasoning)
    for row, why in zip(filter(None, dict.fromkeys(rows)), reply_format.reasons, strict=True):
        assert f"format {row.name}: chosen because the chat template contains " in why


def test_a_name_goes_before_the_template() -> None:
    reply_format = choose("hermes", "none", [TEMPLATES["magistral"][0]])
    assert reply_format.tools is not None
    assert (reply_format.tools.name, reply_format.reasoning) == ("qwen", None)
    assert reply_format.reasons == ("tool format hermes: set by --tool-call-parser",)
    assert choose("none", "none", [TEMPLATES["gpt-oss"][0]]).channels is None
    assert choose("none", None, [TEMPLATES["glm"][0]]).tools is None


def test_the_arguments_take_both_spellings() -> None:
    """Those of SGLang and of vLLM; the value is the name of the row."""
    for argument, names, synonyms in (
        ("tool_call_parser", TOOL_NAMES, TOOL_SYNONYMS),
        ("reasoning_parser", REASONING_NAMES, REASONING_SYNONYMS),
    ):
        assert ARGUMENTS[argument].implemented_choices == names
        assert ARGUMENTS[argument].arg.synonyms == synonyms
        spelled = [*names, *(alias for alias, _ in synonyms)]
        assert len(set(spelled)) == len(spelled), "two rows have the same name"
    assert {
        "deepseek_v3": "deepseekv3",
        "minimax_m2": "minimax-m2",
        "openai": "gpt-oss",
        "qwen25": "qwen",
        "minimax": "jamba",
        "deepseek_v4": "deepseekv32",
        "hy_v3": "hunyuan",
    }.items() <= dict(TOOL_SYNONYMS).items()
    assert make_config({"tool_call_parser": "qwen"}).server.tool_call_parser == "qwen"


def test_the_rows_are_right() -> None:
    assert [(row.name, fault_of(row)) for row in (*TOOL_ROWS, *REASONING_ROWS) if fault_of(row) is not None] == []


@every(
    ("use", "part", "param"),
    [
        (USE, "start the server with --tool-call-parser NAME", "tools"),
        (ToolUse((), ToolCalling.REQUIRED), "has no tools", "tool_choice"),
        (ToolUse(USE.tools, ToolCalling.NAMED, "other"), "the tools are weather, now", "tool_choice"),
        (ToolUse((Tool("a"), Tool("a", where="t[1]"))), "an earlier tool has the same name", "t[1].name"),
    ],
)
def test_refusals(use: ToolUse, part: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        choose("none", "none", []).check(use)
    assert part in caught.value.message
    assert caught.value.param == param


def test_tools_that_may_not_be_called_need_no_format() -> None:
    use = ToolUse(USE.tools, ToolCalling.NONE)
    choose("none", "none", []).check(use)
    assert use.for_template() is None


# ---- rows of other distributions

ROW = """
from srv.reply.rows import Marks, ToolFormat

FORMAT = ToolFormat("acme", call=Marks(("<acme>",), ("</acme>",)), templates=(("<acme>",),))
"""
THOUGHT = """
from srv.reply.rows import Marks, ReasoningFormat

FORMAT = ReasoningFormat("acme", (), Marks(("<hm>",), ("</hm>",)), templates=(("<hm>",),))
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one row."""

    def write(source: str, group: str = "srv.tool_formats", name: str = "acme", entry: str = "acme") -> None:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        sys.modules.pop(f"plugin_{name}", None)
        write_plugin(folder, name, source, group=group, entry=entry, attribute="FORMAT")
        monkeypatch.syspath_prepend(str(folder))

    return write


def test_another_distribution_adds_a_row(install: Install) -> None:
    install(ROW)
    install(THOUGHT, "srv.reasoning_formats", name="other")
    assert ARGUMENTS["tool_call_parser"].implemented_choices == (*TOOL_NAMES, "acme")
    assert ARGUMENTS["reasoning_parser"].implemented_choices == (*REASONING_NAMES, "acme")
    reply = '<hm>A</hm>B<acme>{"name": "now", "arguments": {}}</acme>'
    for reply_format in (choose("acme", "acme", []), choose(None, None, ["<acme> and <hm>"])):
        parser = reply_format.parser(ParserOptions(USE), "")
        assert parser is not None
        assert [event[-1] for event in merged(events_of(parser, reply))] == ["A", "B", "now", "{}", 0]


def test_the_example_package_adds_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As installed: its own entry points, from its pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    installed = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    (installed / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.syspath_prepend(str(tmp_path))
    reply_format = choose(None, None, ["@call @end <hm>"])
    assert [why.partition(":")[0] for why in reply_format.reasons] == [
        "tool format example_calls",
        "reasoning format example_thoughts",
    ]
    parser = reply_format.parser(ParserOptions(USE), "")
    assert parser is not None
    said = merged(events_of(parser, ['<hm>A</hm>B @call now: {"a": 1}@end']))
    assert said == [
        ("reasoning", 0, "A"),
        ("text", 0, "B"),
        ("start", 0, "now"),
        ("arguments", 0, '{"a": 1}'),
        ("end", 0, False),
    ]


@every(
    ("source", "fault"),
    [
        ("raise RuntimeError('half installed')", "importing it raised RuntimeError: half installed"),
        ("FORMAT = 5", "is int, not a ToolFormat"),
        (ROW.replace('"acme", call', '"other", call'), "has a tool format called 'other'"),
        (ROW.replace('("<acme>",), (', '"<acme>", ('), "acme.call: is Marks(begin='<acme>'"),
        (ROW.replace("call=", "bodies=(5,), call="), "acme.bodies[0]: is 5, not one of JsonBody"),
        (ROW.replace("call=", 'ids="{nam}", call='), "acme.ids: is '{nam}', not"),
        (ROW.replace('(("<acme>",),)', '"<acme>"'), "acme.templates: is '<acme>'"),
        (ROW.replace("call=", "trigger=5, call="), "trigger"),
        (ROW.replace("call=", 'one_call="no", call='), "one_call"),
    ],
)
def test_a_faulty_row_names_its_distribution(source: str, fault: str, install: Install) -> None:
    install(source)
    assert choose("qwen", "none", []).tools is not None, "another format is affected"
    for templates in ([], ["<acme>"]):
        with pytest.raises(PluginError) as caught:
            choose("acme" if not templates else None, "none", templates)
        assert caught.value.distribution == "srv-acme"
        assert fault in str(caught.value)


def test_a_name_or_a_template_that_two_claim_is_refused(install: Install) -> None:
    install(ROW.replace('"acme", call', '"qwen", call'), entry="qwen")
    with pytest.raises(PluginError, match="plugin srv and srv-acme: tool format qwen: both claim this name"):
        choose("qwen", "none", [])
    install(ROW, name="one")
    install(ROW.replace('"acme", call', '"emca", call'), name="two", entry="emca")
    with pytest.raises(PluginError, match=r"srv-one and srv-two: .* both claim the same chat template"):
        choose(None, "none", ["<acme>"])


def test_each_wrong_member_is_found() -> None:
    fine = ToolFormat("f", call=Marks(("<f>",)))
    assert fault_of(fine) is None
    for member, value in (
        ("aliases", ("",)),
        ("templates", ("a",)),
        ("section", Marks(())),
        ("call", None),
        ("bodies", ()),
        ("bodies", (JsonBody(names=()),)),
        ("bodies", (PythonBody(None),)),  # type: ignore[arg-type]
        ("bodies", (PythonBody(("[", "]")),)),  # type: ignore[arg-type]
        ("bare", "<f"),
        ("ambiguous", "<f"),
        ("frame", "ab"),
        ("frame", ("a", None)),
        ("frame", None),
    ):
        fault = fault_of(fine._replace(**{member: value}))
        assert fault is not None, member
        assert fault[0].startswith(member)
    thought = ReasoningFormat("f")
    assert fault_of(thought) is None
    for member, value in (("marks", Marks(("<f>",))), ("ends_before", "<f>"), ("around", "<f>")):
        fault = fault_of(thought._replace(**{member: value}))
        assert fault is not None
        assert fault[0] == member


def test_rows_share_no_name() -> None:
    names = [name for row in (*TOOL_ROWS, *CHANNEL_ROWS) for name in (row.name, *row.aliases)]
    assert len(set(names)) == len(names)
    assert Transcript("qwen", "").thinks == "none"

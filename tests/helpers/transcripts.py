"""Replies as models write them, one or more per format, with what they say. Written from the formats' descriptions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from srv.reply.events import CallArguments, CallEnd, CallStart, Reasoning, ReplyEvent, Text
from srv.reply.formats import choose
from srv.reply.parser import ParserOptions, ReplyParser
from srv.reply.tools import Tool, ToolUse

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"level": {"enum": [1, 2]}},
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": ["boolean", "null"]},
        "near": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "level": {"$ref": "#/$defs/level"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = (Tool("weather", "The weather.", SCHEMA), Tool("now"), Tool("get-time_2.x"))
USE = ToolUse(TOOLS)


class Transcript(NamedTuple):
    """A reply to `prompt` and what it consists of; `calls`: pairs of name and arguments."""

    tools: str
    reply: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    text: str = ""
    reasoning: str = ""
    thinks: str = "none"  # the reasoning format
    prompt: str = ""


PARIS: dict[str, Any] = {"city": "Paris", "days": 2}
ODD: dict[str, Any] = {"city": 'a "b" \\ {x} ]</tool_call> é', "near": ["[", "}"], "more": {"k": [1, {"z": None}]}}
_ODD_JSON = '{"city": "a \\"b\\" \\\\ {x} ]</tool_call> \\u00e9", "near": ["[", "}"], "more": {"k": [1, {"z": null}]}}'
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_SECTION = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
TWO = (("weather", PARIS), ("now", {}))
PARIS_JSON = '{"city": "Paris", "days": 2}'
_TWO_JSON = f'{{"name": "weather", "arguments": {PARIS_JSON}}}, {{"name": "now", "arguments": {{}}}}'
_STEP3 = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">\n{}</steptml:invoke><｜tool_call_end｜>\n'
)
_PLAMO = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{}<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|>"
    "<|plamo:end_tool_request:plamo|>"
)
_FENCES = 'Two:\n```json\n[{"name": "Ann", "arguments": {}}]\n```\n```python\nnow()\n```'


def _m3(arguments: str) -> str:
    """Each tag has the namespace token before it."""
    calls = f'<tool_call>\n<invoke name="weather">{arguments}</invoke>\n<invoke name="now"></invoke>\n</tool_call>'
    return calls.replace("<", "]<]minimax[>[<")


TRANSCRIPTS: tuple[Transcript, ...] = (
    # Hermes, Qwen 2.5 and 3
    Transcript(
        "hermes",
        f'I look it up.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        TWO,
        "I look it up.",
    ),
    Transcript(
        "qwen25", f'<tool_call>{{"arguments": {_ODD_JSON}, "name": "weather"}}</tool_call>', (("weather", ODD),)
    ),
    Transcript("qwen", f'<tool_call>\n{{"name": "weather", "arguments": {_ODD_JSON}}}\n', (("weather", ODD),)),
    Transcript("hermes", '<tool_call>{"name": "now"}</tool_call>', (("now", {}),)),
    Transcript("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', (("now", {"a": 1}),)),
    Transcript("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call> Done.', (("now", {}),), "Done."),
    Transcript(
        "hermes",
        f'<think>Which city?</think>\n\n<tool_call>\n{{"name": "weather", "arguments": {PARIS_JSON}}}\n</tool_call>',
        (("weather", PARIS),),
        reasoning="Which city?",
        thinks="qwen3",
    ),
    Transcript(
        "hermes",
        "No calls: 1 < 2, and\n a <tool_ is no marker. \n",
        (),
        "No calls: 1 < 2, and\n a <tool_ is no marker. \n",
    ),
    Transcript(
        "hermes",
        'Before.\n\n<tool_call>{"name": "now"}</tool_call>\nThen.<tool_call>\n{"name": "now"}\n</tool_call> \nEnd.\n',
        (("now", {}), ("now", {})),
        "Before.\n\nThen. \nEnd.",
    ),
    Transcript(
        "hermes",
        '<tool_call>[{"name": 5}, {"name": "now"}, {"name": []}, {"name": "now"}]</tool_call>',
        (("now", {}), ("now", {})),
        '{"name": 5}\n{"name": []}',
    ),
    # Qwen 3 Coder
    Transcript(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        TWO,
        "Sure.",
    ),
    Transcript(
        "qwen3_xml",
        '<tool_call>\n<function=weather>\n<parameter=city>\n\nline "1"\n</p>\n\n</parameter>\n<parameter=exact>\nTrue\n'
        '</parameter>\n<parameter=near>\n["a", "b"]\n</parameter>\n<parameter=more>\n{\'k\': None}\n</parameter>\n'
        "<parameter=level>\n2\n</parameter>\n<parameter=note>\n5\n</parameter>\n<parameter=other>\n5\n</parameter>\n"
        "</function>\n<function=now>\n</function>\n</tool_call>",
        (
            (
                "weather",
                {
                    "city": '\nline "1"\n</p>\n',
                    "exact": True,
                    "near": ["a", "b"],
                    "more": {"k": None},
                    "level": 2,
                    "note": "5",
                    "other": "5",
                },
            ),
            ("now", {}),
        ),
    ),
    Transcript(  # no opener, and a missing </parameter>
        "qwen3_coder",
        "<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        (("weather", PARIS),),
    ),
    Transcript(  # Qwen 3.5: the call ends the reasoning
        "qwen3_coder",
        "I may use <tool_call> here.\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        (("now", {}),),
        reasoning="I may use <tool_call> here.",
        thinks="qwen3",
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    Transcript(
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n</function>\n"
        "</seed:tool_call>",
        (("weather", PARIS),),
    ),
    # Llama
    Transcript("llama3", f'{{"name": "weather", "parameters": {PARIS_JSON}}}', (("weather", PARIS),)),
    Transcript(
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS_JSON}}}; '
        '{"name": "now", "parameters": {}}',
        TWO,
    ),
    Transcript("llama3", '{"name": "Ann", "parameters": {"age": 5}}', (), '{"name": "Ann", "parameters": {"age": 5}}'),
    Transcript(
        "llama3",
        f'I look it up.\n{{"name": "weather", "parameters": {PARIS_JSON}}}; {{"name": "now", "parameters": {{}}}}',
        TWO,
        "I look it up.",
    ),
    Transcript(
        "llama3",
        'Send {"type": "x"} or {"name": "Ann", "parameters": {}}.',
        (),
        'Send {"type": "x"} or {"name": "Ann", "parameters": {}}.',
    ),
    Transcript(
        "llama3",
        '<tool_call>{"name": "now", "parameters": {}}</tool_call>',
        (),
        '<tool_call>{"name": "now", "parameters": {}}</tool_call>',
    ),
    Transcript("llama3", '{"name": "now"}', (), '{"name": "now"}'),
    Transcript("llama3", '{"title": [1, 2]}\n', (), '{"title": [1, 2]}\n'),
    Transcript("pythonic", "[weather(city='Paris', days=2), now()]", TWO),
    Transcript("pythonic", "[now(at=f()), weather(city='Paris', days=2), now()]", TWO, "now(at=f())"),
    Transcript(
        "llama4_pythonic",
        "<|python_start|>[weather(city='a)]\\'', days=-1, near=[\"x\", 'y'], more={'k': (True, null)}, exact=None)]"
        "<|python_end|>",
        (("weather", {"city": "a)]'", "days": -1, "near": ["x", "y"], "more": {"k": [True, None]}, "exact": None}),),
    ),
    Transcript("pythonic", "[1] The first source.", (), "[1] The first source."),
    Transcript("pythonic", "[f(x) for x in y]", (), "[f(x) for x in y]"),
    Transcript("pythonic", "[weather(open('file'))]", (), "[weather(open('file'))]"),
    Transcript("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>It is late.", (("now", {}),), "It is late."),
    Transcript("olmo3", '<function_calls>weather(city="Paris", days=2)\nnow()</function_calls>', TWO),
    # Mistral
    Transcript(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS_JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        TWO,
    ),
    Transcript("mistral", f"Now.[TOOL_CALLS]weather[ARGS]{PARIS_JSON}[TOOL_CALLS]now[ARGS]{{}}", TWO, "Now."),
    Transcript("mistral", f"[TOOL_CALLS]weather{PARIS_JSON}[TOOL_CALLS]now {{}}", TWO),
    Transcript("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", (("now", {}),)),
    Transcript("mistral", "[THINK]Hm, [1].[/THINK]Yes.", (), "Yes.", "Hm, [1].", "mistral"),
    # DeepSeek
    Transcript(
        "deepseek_v3",
        "Ok" + _SECTION.format(_V3.format("weather", PARIS_JSON) + "\n" + _V3.format("now", "{}")),
        TWO,
        "Ok",
    ),
    Transcript(
        "deepseekv31",
        "Ok\n" + _SECTION.format(_V31.format("weather", PARIS_JSON) + _V31.format("now", "{}")),
        TWO,
        "Ok",
    ),
    Transcript(
        "deepseekv31",
        "Rain?</think>" + _SECTION.format(_V31.format("now", "{}")),
        (("now", {}),),
        reasoning="Rain?",
        thinks="deepseek-v3",
        prompt="<｜Assistant｜><think>",
    ),
    Transcript(
        "deepseekv32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        TWO,
    ),
    Transcript("deepseekv3", "<think>\na</think>b", (), "b", "a", "deepseek-r1"),
    Transcript("qwen", "<think>a</think>b", (), "b", "a", "qwen3", "x<think>\n"),
    Transcript("deepseekv3", "thinking\n</think>\n\nAnswer.", (), "Answer.", "thinking", "deepseek-r1"),
    Transcript("deepseekv3", "never ends", (), "", "never ends", "deepseek_r1"),
    Transcript("deepseekv3", "Answer.", (), "Answer.", "", "deepseek-r1", "x<think>\n\n</think>\n\n"),
    # GLM
    Transcript(
        "glm45",
        "<think>Where?</think>\nLet me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris"
        "</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        TWO,
        "Let me see.",
        "Where?",
        "glm45",
    ),
    Transcript(
        "glm47",
        "<think>Where?<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        (("weather", {"city": "7"}), ("now", {})),
        reasoning="Where?",
        thinks="glm47",
    ),
    # Kimi
    Transcript(
        "kimi_k2",
        "Hm.</think>Two.<|tool_calls_section_begin|>"
        + _KIMI.format("weather:4", PARIS_JSON)
        + _KIMI.format("now:5", "{}")
        + "<|tool_calls_section_end|>",
        TWO,
        "Two.",
        "Hm.",
        "kimi_k2",
        "<think>",
    ),
    Transcript(
        "kimi_k2",
        "<think>Hm.<|tool_call_section_begin|>" + _KIMI.format("get-time_2.x:0", "{}"),
        (("get-time_2.x", {}),),
        reasoning="Hm.",
        thinks="kimi",
    ),
    # gpt-oss
    Transcript(
        "gpt-oss",
        "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{PARIS_JSON}<|call|>",
        (("weather", PARIS),),
        "I look.",
        "Which city?",
    ),
    Transcript(
        "openai",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>"
        "<|call|>",
        (("now", {}),),
        reasoning="A",
    ),
    Transcript("gpt-oss", "<|channel|>final<|message|>Paris: 5 < 6.<|return|>", (), "Paris: 5 < 6."),
    Transcript("gpt-oss", "No header at all.", (), "No header at all."),
    Transcript(  # a tool that is no function of the request is called in the reasoning
        "gpt-oss", "<|channel|>analysis to=python code<|message|>1+1<|end|>", (), "", "1+1"
    ),
    # MiniMax
    Transcript(
        "minimax_m2",
        'First.\n</think>\n\nThen.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris'
        "</parameter>\n"
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        TWO,
        "Then.",
        "First.",
        "minimax",
        "ai\n<think>\n",
    ),
    # Granite
    Transcript("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS_JSON}}}]', (("weather", PARIS),)),
    Transcript("granite", '<tool_call>[{"name": "now", "arguments": {}}]', (("now", {}),)),
    Transcript("granite4", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', (("now", {}),)),
    Transcript(
        "granite",
        "Here is my thought process: Where? Here is my response: Paris.",
        (),
        "Paris.",
        "Where?",
        "granite",
    ),
    # Gemma
    Transcript(
        "gemma4",
        '<|channel>thought\nWhere?<channel|>Ok.<|tool_call>call:weather{city:<|"|>a}"b<|"|>,days:2,near:[<|"|>x<|"|>],'
        "more:{k:[1,true,null]}}<tool_call|>",
        (("weather", {"city": 'a}"b', "days": 2, "near": ["x"], "more": {"k": [1, True, None]}}),),
        "Ok.",
        "Where?",
        "gemma4",
    ),
    Transcript(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        (("weather", PARIS),),
    ),
    # others
    Transcript("phi4_mini_json", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', (("now", {}),)),
    Transcript(
        "internlm", '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>', (("now", {}),)
    ),
    Transcript("jamba", '<tool_calls>[\n  {"name": "now", "arguments": {}}\n]</tool_calls>', (("now", {}),)),
    Transcript("granite-20b-fc", '<function_call>{"name": "now", "arguments": {}}', (("now", {}),)),
    Transcript(
        "cohere_command4",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        (("now", {}),),
    ),
    Transcript("qwen", "<seed:think>A</seed:think>B", (), "B", "A", "seed_oss"),
    Transcript("nemotron_json", f"Ok.<TOOLCALL>[{_TWO_JSON}]</TOOLCALL>", TWO, "Ok."),
    Transcript(
        "minimax", f"Ok.\n<tool_calls>\n{_TWO_JSON.replace('}, {', '}' + chr(10) + '{')}\n</tool_calls>", TWO, "Ok."
    ),
    Transcript(
        "gigachat3",
        f'Ok.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {PARIS_JSON}}}',
        (("weather", PARIS),),
        "Ok.",
    ),
    Transcript(
        "gigachat3",
        f'<|function_call|>{{"name": "weather", "arguments": {PARIS_JSON}}}<|message_sep|>\n\n',
        (("weather", PARIS),),
    ),
    Transcript(
        "step3",
        "Ok.\n<｜tool_calls_begin｜>\n"
        + _STEP3.format(
            "weather",
            '<steptml:parameter name="city">Paris</steptml:parameter>\n'
            '<steptml:parameter name="days">2</steptml:parameter>\n',
        )
        + _STEP3.format("now", "")
        + "<｜tool_calls_end｜>",
        TWO,
        "Ok.",
    ),
    # xLAM
    Transcript("xlam", f"[{_TWO_JSON}]", TWO),
    Transcript("xlam", f"Ok.\n```json\n[{_TWO_JSON}]\n```\nDone.", TWO, "Ok.\nDone."),
    Transcript("xlam", f"<think>Hm.</think>[{_TWO_JSON}]", TWO, reasoning="Hm.", thinks="qwen3"),
    Transcript("xlam", f"<tool_call>[{_TWO_JSON}]</tool_call>", TWO),
    Transcript("xlam", f"[TOOL_CALLS][{_TWO_JSON}]", TWO),
    Transcript("xlam", _FENCES, (), _FENCES),
    # MiniMax-M3, nested
    Transcript(
        "minimax_m3",
        "Where?</mm:think>Ok."
        + _m3(
            '<city>a "b"\n</city><days>2</days><near><item>x</item><item>]</item></near><more><k><item>1</item>'
            "<item><more>2</more></item></k><z>é</z></more><exact>null</exact><level>2</level><more2><a>1</a></more2>",
        ),
        (
            (
                "weather",
                {
                    "city": 'a "b"\n',
                    "days": 2,
                    "near": ["x", "]"],
                    "more": {"k": ["1", {"more": "2"}], "z": "é"},
                    "exact": None,
                    "level": 2,
                    "more2": {"a": "1"},
                },
            ),
            ("now", {}),
        ),
        "Ok.",
        "Where?",
        "minimax-m3",
        "<mm:think>",
    ),
    Transcript("minimax-m3", "</mm:think>Paris.", (), "Paris.", thinks="minimax_m3", prompt="x"),
    # DeepSeek V4
    Transcript(
        "deepseek_v4",
        'Hm.</think>Ok.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter '
        'name="city" string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        TWO,
        "Ok.",
        "Hm.",
        "deepseek_v4",
        "<think>",
    ),
    Transcript(  # an object of JSON instead of tags
        "deepseekv4",
        f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n{PARIS_JSON}\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n{}\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        TWO,
    ),
    # Kimi K3
    Transcript(
        "kimi_k3",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        TWO,
        "Ok.",
        "Hm.",
        "kimi_k3",
        "<|open|>think<|sep|>",
    ),
    Transcript(
        "kimi_k3",
        "Hm.<|open|>response<|sep|>5<|close|>response<|sep|>",
        (),
        "5",
        "Hm.",
        "kimi_k3",
        "<|open|>think<|sep|>",
    ),
    # Hy3, in two vocabularies
    *(
        Transcript(
            "hy_v3",
            f"Hm.\n<tool_calls{suffix}>\n<tool_call{suffix}>weather<tool_sep{suffix}>\n<arg_key{suffix}>city</arg_key{suffix}>\n"
            f"<arg_value{suffix}>Paris</arg_value{suffix}>\n<arg_key{suffix}>days</arg_key{suffix}>\n<arg_value{suffix}>2"
            f"</arg_value{suffix}>\n</tool_call{suffix}>\n<tool_call{suffix}>now<tool_sep{suffix}>\n</tool_call{suffix}>\n"
            f"</tool_calls{suffix}>",
            TWO,
            reasoning="Hm.",
            thinks="hy_v3",
            prompt=f"<think{suffix}>",
        )
        for suffix in ("", ":opensource")
    ),
    # Apertus, with calls in its answer and within its reasoning
    Transcript(
        "apertus",
        f'<|inner_prefix|>Hm.<|inner_suffix|>Ok.<|tools_prefix|>[{{"weather": {PARIS_JSON}}}, {{"now": {{}}}}]'
        "<|tools_suffix|>",
        TWO,
        "Ok.",
        "Hm.",
        "apertus",
    ),
    Transcript(
        "apertus2509",
        '<|inner_prefix|>Hm.<|tools_prefix|>[{"now": null}]<|tools_suffix|><|inner_suffix|>Ok.',
        (("now", {}),),
        "Ok.",
        "Hm.",
        "apertus2509",
    ),
    Transcript(
        "dots",
        'Ok.<dots_function_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</dots_function_call>',
        TWO,
        "Ok.",
    ),
    Transcript("dots", '<dots_function_call>{"name": "now", "arguments": {}}</dots_function_call>', (("now", {}),)),
    Transcript(
        "plamo3",
        "<|plamo:begin_think:plamo|>Hm.<|plamo:end_think:plamo|>Ok.<|plamo:begin_tool_requests:plamo|>"
        + _PLAMO.format("weather", PARIS_JSON)
        + _PLAMO.format("now", "{}")
        + "<|plamo:end_tool_requests:plamo|>",
        TWO,
        "Ok.",
        "Hm.",
        "plamo3",
    ),
    Transcript(
        "poolside_v1",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\nParis\n</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        TWO,
    ),
)

OPTIONS = ParserOptions(USE)


def parser_of(transcript: Transcript, options: ParserOptions = OPTIONS) -> ReplyParser:
    parser = choose(transcript.tools, transcript.thinks, []).parser(options, transcript.prompt)
    assert parser is not None
    return parser


def events_of(parser: ReplyParser, parts: Iterable[str], cut: bool = False) -> list[ReplyEvent]:
    events = [event for part in parts for event in parser.feed(part)]
    return [*events, *parser.finish(cut)]


def merged(events: Iterable[ReplyEvent]) -> list[tuple[object, ...]]:
    """The events without ids, and with neighbours of one kind as one: what does not depend on the cuts."""
    merged_events: list[tuple[object, ...]] = []
    for event in events:
        match event:
            case CallStart(index, _, name):
                merged_events.append(("start", index, name))
            case CallEnd(index, cut):
                merged_events.append(("end", index, cut))
            case CallArguments(index, text):
                _append(merged_events, ("arguments", index), text)
            case Text(text):
                _append(merged_events, ("text", 0), text)
            case Reasoning(text):
                _append(merged_events, ("reasoning", 0), text)
    return merged_events


def _append(events: list[tuple[object, ...]], kind: tuple[object, ...], text: str) -> None:
    assert text, "an event is empty"
    if events and events[-1][:2] == kind:
        events[-1] = (*kind, f"{events[-1][2]}{text}")
    else:
        events.append((*kind, text))

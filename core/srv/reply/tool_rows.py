"""The formats of tool calls that `srv` knows, one row each. Sources: the chat templates and model cards of the models.

A row takes about ten lines, and another distribution can add one by an entry point of the group `srv.tool_formats`.
"""

from __future__ import annotations

from srv.reply.rows import (
    BareBody,
    HeaderBody,
    JsonBody,
    Marks,
    PythonBody,
    TaggedBody,
    ToolFormat,
)

_DEEPSEEK = Marks(
    ("<｜tool▁calls▁begin｜>",),
    ("<｜tool▁calls▁end｜>",),
)
_DEEPSEEK_CALL = Marks(("<｜tool▁call▁begin｜>",), ("<｜tool▁call▁end｜>",))
_SEP = "<｜tool▁sep｜>"
_FUNCTION_XML = TaggedBody(
    name=("<function=", (">",)),
    key=("<parameter=", ">"),
    end="</parameter>",
    close=("</function>",),
    cut=("\n<parameter=", "\n</function>\n</tool_call>", "\n</function>\n</seed:tool_call>"),
    gap="\n",
)
_GLM = TaggedBody(
    name=("", ("\n", "<arg_key>", "</tool_call>")),
    stays=("<arg_key>", "</tool_call>"),
    key=("<arg_key>", "</arg_key>"),
    value="<arg_value>",
    end="</arg_value>",
    newline=False,
    gap="\n",
)


def _dsml(mark: str) -> tuple[HeaderBody, TaggedBody]:
    """The arguments are an object of JSON, or have tags."""
    header = HeaderBody(('">',), rf'<{mark}invoke name="(?P<name>[^"]+)', suffix=(f"</{mark}invoke>",))
    return header, TaggedBody(
        name=(f'<{mark}invoke name="', ('">',)),
        key=(f'<{mark}parameter name="', '">'),
        end=f"</{mark}parameter>",
        close=(f"</{mark}invoke>",),
        raw='" string="true',
        json='" string="false',
        newline=False,
        gap="\n",
    )


def _hunyuan(suffix: str) -> TaggedBody:
    """`suffix`: of the tokens in the model's vocabulary."""
    return TaggedBody(
        name=("", (f"<tool_sep{suffix}>",)),
        key=(f"<arg_key{suffix}>", f"</arg_key{suffix}>"),
        value=f"<arg_value{suffix}>",
        end=f"</arg_value{suffix}>",
        newline=False,
        gap="\n",
    )


_INVOKE = TaggedBody(
    name=('<invoke name="', ('">',)),
    key=('<parameter name="', '">'),
    end="</parameter>",
    close=("</invoke>",),
    gap="\n",
)
_PLAMO_ARGUMENTS = (
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
)
_MINIMAX_M3 = "]<]minimax[>["

TOOL_ROWS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "qwen",
        ("qwen25", "hermes", "granite4", "longcat", "ernie45"),
        call=Marks(("<tool_call>", "<longcat_tool_call>"), ("</tool_call>", "</longcat_tool_call>")),
        templates=(("<tool_call>", "arguments"),),
        frame=('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>\n"),
        trigger="<tool_call>",
    ),
    ToolFormat(
        "qwen3_coder",
        ("qwen3_xml", "mimo", "step3p5"),
        section=Marks(("<tool_call>",), ("</tool_call>",)),
        bodies=(_FUNCTION_XML,),
        bare=("<function=",),
        templates=(("<tool_call>", "<function=", "<parameter="),),
        frame=("<tool_call>\n<function={name}>", "\n</function>\n</tool_call>"),
        trigger="<tool_call>",
    ),
    ToolFormat(
        "seed_oss",
        section=Marks(("<seed:tool_call>",), ("</seed:tool_call>",)),
        bodies=(_FUNCTION_XML,),
        templates=(("<seed:tool_call>",),),
        frame=("<seed:tool_call>\n<function={name}>", "\n</function>\n</seed:tool_call>"),
        trigger="<seed:tool_call>",
    ),
    ToolFormat(
        "llama3",
        ("llama3_json", "llama4_json"),
        call=Marks(("<|python_tag|>",)),
        bodies=(JsonBody(separators=(";",)),),
        unmarked=True,
        bare=('{"name"', '{ "name"', '{"type"', '{ "type"'),
        templates=(("<|python_tag|>", '"parameters"'), ("<|eot_id|>", '{"name": function name, "parameters"')),
        frame=('{"name": "{name}", "parameters": ', "}"),
        trigger="",
        one_call=True,
    ),
    ToolFormat(
        "pythonic",
        ("llama4_pythonic", "llama4"),
        call=Marks(("<|python_start|>",), ("<|python_end|>",)),
        bodies=(PythonBody(),),
        unmarked=True,
        templates=(("<|python_start|>",), ("[func_name1(params_name1=params_value1",)),
        frame=("[{name}(", ")]"),
        one_call=True,
    ),
    ToolFormat(
        "lfm2",
        call=Marks(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        bodies=(PythonBody(), JsonBody()),
        templates=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        frame=("<|tool_call_start|>[{name}(", ")]<|tool_call_end|>"),
        trigger="<|tool_call_start|>",
        one_call=True,
    ),
    ToolFormat(
        "olmo3",
        call=Marks(("<function_calls>",), ("</function_calls>",)),
        bodies=(PythonBody(brackets=""),),
        templates=(("<function_calls>", "<functions>"),),
        frame=("<function_calls>{name}(", ")</function_calls>"),
        trigger="<function_calls>",
        one_call=True,
    ),
    ToolFormat(
        "mistral",
        call=Marks(("[TOOL_CALLS]",)),
        bodies=(JsonBody(), HeaderBody(("[ARGS]",), r"(?P<name>[^\s\[\]{}]+)(\[CALL_ID\](?P<id>\w+))?", stays=("{",))),
        ids="short",
        templates=(("[TOOL_CALLS]",),),
        frame=('[TOOL_CALLS] [{"name": "{name}", "arguments": ', "}]"),
        trigger="[TOOL_CALLS]",
        one_call=True,
    ),
    ToolFormat(
        "deepseekv3",
        ("deepseek_v3",),
        section=_DEEPSEEK,
        call=_DEEPSEEK_CALL,
        bodies=(HeaderBody(("```jsonc\n", "```json\n"), rf"(function)?\s*{_SEP}\s*(?P<name>[^\s<>]+)", ("```",)),),
        templates=((_SEP, "```json"),),
        frame=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        trigger="<｜tool▁calls▁begin｜>",
        one_call=True,
    ),
    ToolFormat(
        "deepseekv31",
        ("deepseek_v31",),
        section=_DEEPSEEK,
        call=_DEEPSEEK_CALL,
        bodies=(HeaderBody((_SEP,)),),
        templates=((_SEP,),),
        frame=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        trigger="<｜tool▁calls▁begin｜>",
        one_call=True,
    ),
    ToolFormat(
        "deepseekv32",
        ("deepseek_v32", "deepseekv4", "deepseek_v4"),
        section=Marks(
            ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<function_calls>"),
            ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>", "</function_calls>"),
        ),
        bodies=(*_dsml("｜DSML｜"), *_dsml("")),
        templates=(("｜DSML｜",),),
        frame=(
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">',
            "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        trigger="<｜DSML｜function_calls>",
        one_call=True,
    ),
    ToolFormat(
        "glm",
        ("glm45", "glm47"),
        call=Marks(("<tool_call>",), ("</tool_call>",)),
        bodies=(_GLM,),
        templates=(("<tool_call>", "<arg_key>", "<arg_value>"),),
        frame=("<tool_call>{name}", "\n</tool_call>"),
        trigger="<tool_call>",
    ),
    ToolFormat(
        "kimi_k2",
        section=Marks(
            ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            ("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        ),
        call=Marks(("<|tool_call_begin|>",), ("<|tool_call_end|>",)),
        bodies=(
            HeaderBody(("<|tool_call_argument_begin|>",), r"(?P<id>(functions\.)(?P<name>[^\s:<>]+):\d+)"),
            HeaderBody(("<|tool_call_argument_begin|>",), r"(functions\.)?(?P<name>[^\s:<>]+?)(:\d+)?"),
        ),
        ids="functions.{name}:{index}",
        templates=(("<|tool_calls_section_begin|>",), ("<|tool_call_begin|>", "<|im_middle|>")),
        frame=(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        trigger="<|tool_calls_section_begin|>",
        one_call=True,
    ),
    ToolFormat(
        "minimax-m2",
        ("minimax_m2",),
        section=Marks(("<minimax:tool_call>",), ("</minimax:tool_call>",)),
        bodies=(_INVOKE._replace(cut=('\n<parameter name="', "\n</invoke>\n</minimax:tool_call>")),),
        templates=(("<minimax:tool_call>",),),
        frame=('<minimax:tool_call>\n<invoke name="{name}">', "\n</invoke>\n</minimax:tool_call>"),
        trigger="<minimax:tool_call>",
        one_call=True,
    ),
    ToolFormat(
        "granite",
        call=Marks(("<|tool_call|>", "<tool_call>"), ("</tool_call>",)),
        templates=(("<|tool_call|>", "tool_response"), ("<|start_of_role|>", "<tool_call>[")),
        frame=('<|tool_call|>[{"name": "{name}", "arguments": ', "}]"),
        trigger="<|tool_call|>",
        one_call=True,
    ),
    ToolFormat(
        "granite-20b-fc",
        call=Marks(("<function_call>",), ("</function_call>",)),
        templates=(("<function_call>", '"name"'),),
        frame=('<function_call>{"name": "{name}", "arguments": ', "}"),
        trigger="<function_call>",
    ),
    ToolFormat(
        "phi4_mini_json",
        call=Marks(("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
        templates=(("<|tool|>", "<|/tool|>"),),
        frame=('<|tool_call|>[{"name": "{name}", "arguments": ', "}]<|/tool_call|>"),
        trigger="<|tool_call|>",
        one_call=True,
    ),
    ToolFormat(
        "internlm",
        ("interns1",),
        call=Marks(("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",)),
        templates=(("<|action_start|>", "<|plugin|>"),),
        frame=('<|action_start|><|plugin|>\n{"name": "{name}", "parameters": ', "}<|action_end|>"),
        trigger="<|action_start|><|plugin|>",
        one_call=True,
    ),
    ToolFormat(
        "jamba",
        ("hunyuan_a13b", "minimax"),
        call=Marks(("<tool_calls>",), ("</tool_calls>",)),
        templates=(("<tool_calls>[",), ("<tool_calls>", '"arguments"')),
        frame=('<tool_calls>[\n  {"name": "{name}", "arguments": ', "}\n]</tool_calls>"),
        trigger="<tool_calls>",
        one_call=True,
    ),
    ToolFormat(
        "cohere_command4",
        ("cohere_command3",),
        call=Marks(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
        bodies=(JsonBody(names=("tool_name", "name")),),
        templates=(("<|START_ACTION|>",),),
        frame=(
            '<|START_ACTION|>[{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": ',
            "}]<|END_ACTION|>",
        ),
        trigger="<|START_ACTION|>",
        one_call=True,
    ),
    ToolFormat(
        "gemma4",
        call=Marks(("<|tool_call>",), ("<tool_call|>",)),
        bodies=(BareBody('<|"|>'),),
        templates=(("<|tool_call>", "<tool_call|>"),),
        frame=("<|tool_call>call:{name}{", "}<tool_call|>"),
        trigger="<|tool_call>",
    ),
    ToolFormat(
        "functiongemma",
        call=Marks(("<start_function_call>",), ("<end_function_call>",)),
        bodies=(BareBody("<escape>"),),
        templates=(("<start_function_call>",),),
        frame=("<start_function_call>call:{name}{", "}<end_function_call>"),
        trigger="<start_function_call>",
    ),
    ToolFormat(
        "step3",
        section=Marks(("<｜tool_calls_begin｜>",), ("<｜tool_calls_end｜>",)),
        call=Marks(("<｜tool_call_begin｜>",), ("<｜tool_call_end｜>",)),
        bodies=(
            TaggedBody(
                name=('function<｜tool_sep｜><steptml:invoke name="', ('">',)),
                key=('<steptml:parameter name="', '">'),
                end="</steptml:parameter>",
                close=("</steptml:invoke>",),
                gap="\n",
            ),
        ),
        templates=(("<｜tool_calls_begin｜>", "steptml:invoke"),),
        frame=(
            '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
            "\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
        ),
        trigger="<｜tool_calls_begin｜>",
        one_call=True,
    ),
    ToolFormat(
        "xlam",
        call=Marks(("[TOOL_CALLS]", "<tool_call>", "```json", "```"), ("</tool_call>", "```")),
        unmarked=True,
        ambiguous=("```json", "```"),
        frame=('[{"name": "{name}", "arguments": ', "}]"),
        one_call=True,
    ),
    ToolFormat(
        "minimax-m3",
        ("minimax_m3",),
        section=Marks((f"{_MINIMAX_M3}<tool_call>",), (f"{_MINIMAX_M3}</tool_call>",)),
        bodies=(
            TaggedBody(
                name=(f'{_MINIMAX_M3}<invoke name="', ('">',)),
                key=(f"{_MINIMAX_M3}<", ">"),
                end=f"{_MINIMAX_M3}</{{key}}>",
                close=(f"{_MINIMAX_M3}</invoke>",),
                newline=False,
                nested=True,
            ),
        ),
        templates=((_MINIMAX_M3,),),
        frame=(
            f'{_MINIMAX_M3}<tool_call>\n{_MINIMAX_M3}<invoke name="{{name}}">',
            f"{_MINIMAX_M3}</invoke>\n{_MINIMAX_M3}</tool_call>",
        ),
        trigger=f"{_MINIMAX_M3}<tool_call>",
        one_call=True,
    ),
    ToolFormat(
        "kimi_k3",
        section=Marks(("<|open|>tools<|sep|>",), ("<|close|>tools<|sep|>",)),
        bodies=(
            TaggedBody(
                name=('<|open|>call tool="', ("<|sep|>",)),
                key=('<|open|>argument key="', "<|sep|>"),
                end="<|close|>argument<|sep|>",
                close=("<|close|>call<|sep|>",),
                raw='" type="string"',
                newline=False,
                attributes='"',
            ),
        ),
        templates=(("<|open|>", "<|close|>", "<|sep|>"),),
        frame=(
            '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>',
            "<|close|>call<|sep|><|close|>tools<|sep|>",
        ),
        trigger="<|open|>tools<|sep|>",
        one_call=True,
    ),
    ToolFormat(
        "nemotron_json",
        call=Marks(("<TOOLCALL>",), ("</TOOLCALL>",)),
        templates=(("<TOOLCALL>",),),
        frame=('<TOOLCALL>[{"name": "{name}", "arguments": ', "}]</TOOLCALL>"),
        trigger="<TOOLCALL>",
        one_call=True,
    ),
    ToolFormat(
        "hunyuan",
        ("hy_v3",),
        section=Marks(("<tool_calls>", "<tool_calls:opensource>"), ("</tool_calls>", "</tool_calls:opensource>")),
        call=Marks(("<tool_call>", "<tool_call:opensource>"), ("</tool_call>", "</tool_call:opensource>")),
        bodies=(_hunyuan(""), _hunyuan(":opensource")),
        templates=(("<tool_calls", "<tool_sep", "<arg_key", "<arg_value"),),
        frame=("<tool_calls>\n<tool_call>{name}<tool_sep>", "\n</tool_call>\n</tool_calls>"),
        trigger="<tool_calls>",
        one_call=True,
    ),
    ToolFormat(
        "apertus",
        ("apertus2509",),
        call=Marks(("<|tools_prefix|>",), ("<|tools_suffix|>",)),
        bodies=(JsonBody(keyed=True),),
        templates=(("<|tools_prefix|>",),),
        frame=('<|tools_prefix|>[{"{name}": ', "}]<|tools_suffix|>"),
        trigger="<|tools_prefix|>",
        one_call=True,
    ),
    ToolFormat(
        "gigachat3",
        call=Marks(
            (
                "<|message_sep|>\n\nfunction call<|role_sep|>\n",
                "<|message_sep|>function call<|role_sep|>\n",
                "function call<|role_sep|>\n",
                "<|function_call|>",
            ),
            ("<|message_sep|>",),
        ),
        templates=(("<|role_sep|>", "<|message_sep|>"),),
        frame=('function call<|role_sep|>\n{"name": "{name}", "arguments": ', "}"),
        trigger="function call<|role_sep|>\n",
        one_call=True,
    ),
    ToolFormat(
        "dots",
        section=Marks(("<dots_function_call>",), ("</dots_function_call>",)),
        bodies=(_INVOKE, JsonBody()),
        templates=(("<dots_function_call>",),),
        frame=('<dots_function_call>\n<invoke name="{name}">', "\n</invoke>\n</dots_function_call>"),
        trigger="<dots_function_call>",
        one_call=True,
    ),
    ToolFormat(
        "plamo3",
        section=Marks(("<|plamo:begin_tool_requests:plamo|>",), ("<|plamo:end_tool_requests:plamo|>",)),
        call=Marks(("<|plamo:begin_tool_request:plamo|>",), ("<|plamo:end_tool_request:plamo|>",)),
        bodies=(
            HeaderBody(
                (_PLAMO_ARGUMENTS,),
                r"<\|plamo:begin_tool_name:plamo\|>(?P<name>[^\s<>{}\[\]]+)",
                ("<|plamo:end_tool_arguments:plamo|>",),
            ),
        ),
        templates=(("<|plamo:begin_tool",),),
        frame=(
            "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}"
            + _PLAMO_ARGUMENTS,
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
        ),
        trigger="<|plamo:begin_tool_requests:plamo|>",
        one_call=True,
    ),
    ToolFormat(
        "poolside_v1",
        call=Marks(("<tool_call>",), ("</tool_call>",)),
        bodies=(_GLM._replace(newline=True),),
        frame=("<tool_call>{name}", "\n</tool_call>"),
        trigger="<tool_call>",
    ),
)

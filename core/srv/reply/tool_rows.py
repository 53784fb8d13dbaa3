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
)
_GLM = TaggedBody(
    name=("", ("\n", "<arg_key>", "</tool_call>")),
    stays=("<arg_key>", "</tool_call>"),
    key=("<arg_key>", "</arg_key>"),
    value="<arg_value>",
    end="</arg_value>",
    newline=False,
)


def _dsml(mark: str) -> TaggedBody:
    return TaggedBody(
        name=(f'<{mark}invoke name="', ('">',)),
        key=(f'<{mark}parameter name="', '">'),
        end=f"</{mark}parameter>",
        close=(f"</{mark}invoke>",),
        raw='" string="true',
        json='" string="false',
        newline=False,
    )


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
    ),
    ToolFormat(
        "seed_oss",
        section=Marks(("<seed:tool_call>",), ("</seed:tool_call>",)),
        bodies=(_FUNCTION_XML,),
        templates=(("<seed:tool_call>",),),
    ),
    ToolFormat(
        "llama3",
        ("llama3_json", "llama4_json"),
        call=Marks(("<|python_tag|>",)),
        bodies=(JsonBody(separators=(";",)),),
        unmarked=True,
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
    ),
    ToolFormat(
        "lfm2",
        call=Marks(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        bodies=(PythonBody(), JsonBody()),
        templates=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    ToolFormat(
        "olmo3",
        call=Marks(("<function_calls>",), ("</function_calls>",)),
        bodies=(PythonBody(brackets=""),),
        templates=(("<function_calls>", "<functions>"),),
    ),
    ToolFormat(
        "mistral",
        call=Marks(("[TOOL_CALLS]",)),
        bodies=(JsonBody(), HeaderBody(("[ARGS]",), r"(?P<name>[^\s\[\]{}]+)(\[CALL_ID\](?P<id>\w+))?")),
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
        ("deepseek_v32",),
        section=Marks(
            ("<｜DSML｜function_calls>", "<function_calls>"), ("</｜DSML｜function_calls>", "</function_calls>")
        ),
        bodies=(_dsml("｜DSML｜"), _dsml("")),
        templates=(("｜DSML｜",),),
    ),
    ToolFormat(
        "glm",
        ("glm45", "glm47"),
        call=Marks(("<tool_call>",), ("</tool_call>",)),
        bodies=(_GLM,),
        templates=(("<tool_call>", "<arg_key>", "<arg_value>"),),
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
        bodies=(
            TaggedBody(
                name=('<invoke name="', ('">',)),
                key=('<parameter name="', '">'),
                end="</parameter>",
                close=("</invoke>",),
                cut=('\n<parameter name="', "\n</invoke>\n</minimax:tool_call>"),
            ),
        ),
        templates=(("<minimax:tool_call>",),),
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
    ),
    ToolFormat(
        "phi4_mini_json",
        call=Marks(("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
        templates=(("<|tool|>", "<|/tool|>"),),
    ),
    ToolFormat(
        "internlm",
        ("interns1",),
        call=Marks(("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",)),
        templates=(("<|action_start|>", "<|plugin|>"),),
    ),
    ToolFormat(
        "jamba",
        ("hunyuan_a13b",),
        call=Marks(("<tool_calls>",), ("</tool_calls>",)),
        templates=(("<tool_calls>[",), ("<tool_calls>", '"arguments"')),
    ),
    ToolFormat(
        "cohere_command4",
        ("cohere_command3",),
        call=Marks(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
        bodies=(JsonBody(names=("tool_name", "name")),),
        templates=(("<|START_ACTION|>",),),
    ),
    ToolFormat(
        "gemma4",
        call=Marks(("<|tool_call>",), ("<tool_call|>",)),
        bodies=(BareBody('<|"|>'),),
        templates=(("<|tool_call>", "<tool_call|>"),),
    ),
    ToolFormat(
        "functiongemma",
        call=Marks(("<start_function_call>",), ("<end_function_call>",)),
        bodies=(BareBody("<escape>"),),
        templates=(("<start_function_call>",),),
    ),
)

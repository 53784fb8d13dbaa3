"""The formats of reasoning that `srv` knows, one row each, and the formats of channels, which are both.

Sources: the chat templates and model cards of the models. A prompt says whether a reply starts inside the reasoning, so
models with the same markers share a row, unless their replies start inside although no prompt says so.
"""

from __future__ import annotations

from srv.reply.rows import ChannelFormat, Marks, ReasoningFormat

_FUNCTION = ("<tool_call>\n<function=", "<tool_call><function=")
# A sentence, as Granite 3.2 writes it in several forms.
_GRANITE = Marks(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)

REASONING_ROWS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(
        "deepseek-r1",
        ("deepseek_r1", "qwen3-thinking", "step3", "step3p5"),
        always=True,
        templates=(("<｜Assistant｜>", "</think>"), ("<｜Assistant｜><think>",)),
    ),
    ReasoningFormat(
        "glm45",
        ("glm47",),
        ends_before=("<tool_call>",),
        templates=(("<think>", "<arg_key>"),),
    ),
    ReasoningFormat(
        "kimi",
        ("kimi_k2",),
        Marks(("<think>", "◁think▷"), ("</think>", "◁/think▷")),
        ends_before=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        templates=(("◁think▷",), ("<think>", "<|im_middle|>")),
    ),
    ReasoningFormat(
        "minimax",
        ("minimax_m2", "minimax-m2"),
        always=True,
        ends_before=("<minimax:tool_call>",),
        templates=(("<think>", "<minimax:tool_call>"),),
    ),
    ReasoningFormat(
        "minimax-m3",
        ("minimax_m3",),
        Marks(("<mm:think>",), ("</mm:think>",)),
        ends_before=("]<]minimax[>[<tool_call>",),
        around=("</mm:think>",),  # before replies without reasoning
        templates=(("<mm:think>",),),
    ),
    ReasoningFormat(
        "kimi_k3",
        (),
        Marks(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>", "<|open|>response<|sep|>")),
        ends_before=("<|open|>tools<|sep|>",),
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        templates=(("<|open|>", "<|close|>", "<|sep|>"),),
    ),
    ReasoningFormat(
        "hunyuan",
        ("hy_v3",),
        Marks(("<think>", "<think:opensource>"), ("</think>", "</think:opensource>")),
        ends_before=("<tool_calls>", "<tool_calls:opensource>"),
        templates=(("<think", "<tool_calls", "<tool_sep"),),
    ),
    ReasoningFormat(
        "apertus",
        ("apertus2509",),
        Marks(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
        ends_before=("<|tools_prefix|>",),
        anywhere=True,
        around=("<|inner_suffix|>",),  # behind calls within the reasoning
        templates=(("<|inner_prefix|>",),),
    ),
    ReasoningFormat(
        "plamo3",
        (),
        Marks(("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",)),
        templates=(("<|plamo:begin_think",),),
    ),
    ReasoningFormat("seed_oss", (), Marks(("<seed:think>",), ("</seed:think>",)), templates=(("<seed:think>",),)),
    ReasoningFormat(
        "mistral",
        (),
        Marks(("[THINK]",), ("[/THINK]",)),
        anywhere=True,
        templates=(("[THINK]", "[/THINK]"),),
    ),
    ReasoningFormat("granite", (), _GRANITE, templates=(("Here is my thought process:",),)),
    ReasoningFormat(
        "gemma4",
        (),
        Marks(("<|channel>thought\n", "<|channel>thought"), ("<channel|>",)),
        anywhere=True,
        ends_before=("<|tool_call>",),
        templates=(("<|channel>", "<channel|>"),),
    ),
    ReasoningFormat(
        "qwen3",
        (
            "deepseek-v3",
            "deepseek_v3",
            "deepseek-v4",
            "deepseek_v4",
            "minimax_m1",
            "mimo",
            "holo2",
            "nemotron_3",
            "nemotron_v3",
            "interns1",
            "poolside_v1",
            "olmo3",
        ),
        ends_before=_FUNCTION,
        templates=(("<think>",),),
    ),
)

CHANNEL_ROWS: tuple[ChannelFormat, ...] = (
    ChannelFormat(
        "gpt-oss",
        ("openai", "openai_gptoss"),
        templates=(("<|channel|>", "<|message|>"),),
        frame=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""),
    ),
)

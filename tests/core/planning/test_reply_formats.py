"""`srv plan` refuses what a launch refuses of the reply formats of other distributions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from args_world import user
from every import every
from platform_plugins import write_plugin

from srv.errors import Rejection
from srv.planning.plan import make_plan

ROW = """
from srv.reply.rows import Marks, ToolFormat

FORMAT = ToolFormat("{name}", call=Marks(("<acme>",), ("</acme>",)), templates=(("<acme>",),))
"""
THOUGHT = """
from srv.reply.rows import Marks, ReasoningFormat

FORMAT = ReasoningFormat("acme", (), Marks({begin}, ("</hm>",)), templates=(("<hm>",),))
"""
TOOLS, REASONING = "srv.tool_formats", "srv.reasoning_formats"


def refused(folder: Path, plugins: Sequence[tuple[str, str, str, str]], **values: object) -> tuple[Rejection, ...]:
    """What a plan for the demo model refuses, with plugins (distribution, group, name of the row, source)."""
    template = folder / "template.jinja"
    template.write_text("{{ messages }} <acme>")
    with pytest.MonkeyPatch.context() as patch:
        for distribution, group, entry, source in plugins:
            sys.modules.pop(f"plugin_{distribution}", None)
            write_plugin(folder / distribution, distribution, source, group=group, entry=entry, attribute="FORMAT")
            patch.syspath_prepend(str(folder / distribution))
        return make_plan(user(device="cpu:avx512", chat_template=str(template), **values)).refusals


def row(distribution: str, name: str) -> tuple[str, str, str, str]:
    return distribution, TOOLS, name, ROW.format(name=name)


@every(
    ("plugins", "argument", "words"),
    [
        (
            [("acme", TOOLS, "acme", "FORMAT = 5")],
            "tool_call_parser",
            "srv-acme: plugin_acme.manifest:FORMAT: is",
        ),
        ([("acme", REASONING, "acme", THOUGHT.format(begin=5))], "reasoning_parser", "srv-acme: acme.marks: is"),
        ([row("one", "acme"), row("two", "acme")], "tool_call_parser", "tool format acme: both claim this name"),
        ([row("one", "acme"), row("two", "emca")], "tool_call_parser", "both claim the same chat template"),
    ],
)
def test_what_a_launch_refuses_is_refused(
    plugins: list[tuple[str, str, str, str]], argument: str, words: str, tmp_path: Path
) -> None:
    (refusal,) = refused(tmp_path, plugins)
    assert (refusal.code, refusal.what) == ("plugin_refused", argument)
    assert words in refusal.reason
    assert refusal.remedy.endswith(".")


def test_a_format_that_no_reply_uses_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "named").mkdir()
    assert refused(tmp_path / "named", [("acme", TOOLS, "acme", "FORMAT = 5")], tool_call_parser="qwen") == ()
    assert refused(tmp_path, [row("one", "acme")]) == ()

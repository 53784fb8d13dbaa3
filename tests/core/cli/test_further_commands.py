"""Subcommands that distributions add through the entry-point group `srv.commands`."""

from __future__ import annotations

from pathlib import Path

import pytest

from srv.cli import main as cli

GREETING = """
def add(subparsers):
    parser = subparsers.add_parser("greet", help="say something kind")
    parser.add_argument("--name", default="you")
    parser.set_defaults(handler=greet)

def greet(namespace):
    print(f"good day, {namespace.name}")
    return 0
"""

BROUGHT = {"greet": "greeting_command", "wreck": "broken_command", "plan": "broken_command"}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One good command, and one whose module is broken."""
    (tmp_path / "greeting_command.py").write_text(GREETING)
    (tmp_path / "broken_command.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / "commands-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: commands\nVersion: 1.0\n")
    lines = (f"{name} = {module}:add" for name, module in BROUGHT.items())
    (info / "entry_points.txt").write_text("\n".join((f"[{cli.COMMAND_GROUP}]", *lines)))


@pytest.mark.usefixtures("commands")
def test_a_distribution_brings_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["greet", "--name", "Ada"]) == 0
    assert capsys.readouterr().out == "good day, Ada\n"


@pytest.mark.usefixtures("commands")
def test_help_and_suggestions_include_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "say something kind" in out
    assert "cannot be loaded" in out
    assert cli.main(["gret"]) == 2
    assert "Did you mean greet?" in capsys.readouterr().err


@pytest.mark.usefixtures("commands")
def test_broken_command_is_refused_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wreck", "--anything"]) == 2
    assert "command wreck: adding it raised RuntimeError: half installed" in capsys.readouterr().err


@pytest.mark.usefixtures("commands")
def test_commands_of_core_cannot_be_replaced() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--help"])
    assert ended.value.code == 0

"""The families of plugins: all are listed, with what is wrong with each plugin and none in the way of another."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from args_world import user
from platform_plugins import manifest_source, write_plugin

from srv.cli.families import FAMILIES, GROUPS, Plugin, absent_families, installed_plugins
from srv.cli.launch import log_provenance
from srv.cli.main import main
from srv.planning.resolution import resolve_launch

ROOT = Path(__file__).resolve().parents[3]
BACKEND = """
from srv.platform.facts import BackendSpec, Requires

MANIFEST = BackendSpec("fast", 50, lambda context: Requires(), "nowhere:Fast", "page_token_head")
"""
HOOKS = """
from srv.hooks import hookimpl


class MANIFEST:
    @hookimpl
    def srv_step(self, event):
        pass
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, name: str, group: str, entry: str, source: str) -> None:
    sys.modules.pop(f"plugin_{name}", None)
    write_plugin(site, name, source, group=group, entry=entry)


def plugins_of(distribution: str) -> Plugin:
    (plugin,) = [entry for entry in installed_plugins() if entry.distribution == distribution]
    return plugin


def test_every_group_that_srv_reads_is_of_a_family() -> None:
    """The groups in the sources, as the line that shows an entry point, or as a constant."""
    texts = [path.read_text() for path in (ROOT / "core" / "srv").rglob("*.py")]
    named = re.compile(r'(?:entry-points\."|_?GROUP = "|_GROUP = ")(srv\.[a-z_.]+)"')
    read = {group for text in texts for group in named.findall(text)}
    assert len(read) > 12
    assert read - {"srv.backends"} - set(GROUPS) == set()


def test_every_family_has_a_page() -> None:
    pages = {family.page for family in FAMILIES}
    assert [page for page in pages if not (ROOT / "docs" / f"{page}.md").is_file()] == []


def test_plugins_are_listed_with_distribution_and_version(site: Path) -> None:
    install(site, "acme", "srv.backends.attention", "cpu.fast", BACKEND)
    install(site, "audit", "srv.hooks", "audit", HOOKS)
    backend, hooks = plugins_of("srv-acme"), plugins_of("srv-audit")
    assert backend[:6] == ("attention backend", "srv.backends.attention", "cpu.fast", "srv-acme", "3.2.1", "ok")
    assert backend.detail == "priority 50 on platform cpu"
    assert (hooks.family, hooks.state, hooks.detail) == ("plugin of hooks", "ok", "srv_step")
    assert "plugin of hooks" not in absent_families()
    assert {"weight loader", "tool format"} <= set(absent_families())
    assert [plugin.family for plugin in installed_plugins() if plugin.name == "matrix"] == [
        "command",
        "findings of the doctor",
    ]


def test_a_faulty_plugin_of_any_family_is_named_and_the_others_are_listed(site: Path) -> None:
    """Only hooks stop every launch; what is wrong with a plugin of another family stops those that use it."""
    for number, family in enumerate(FAMILIES):
        install(site, f"wreck{chr(97 + number)}", family.group, "cpu.wreck", "raise RuntimeError('half installed')")
    actual = [plugin for plugin in installed_plugins() if plugin.name == "cpu.wreck"]
    assert [plugin.group for plugin in actual] == list(GROUPS)
    assert [plugin.group for plugin in actual if plugin.state != "warning"] == ["srv.hooks"]
    assert [plugin for plugin in actual if "half installed" not in plugin.detail or not plugin.remedy] == []


def test_an_unknown_group_and_an_unknown_platform_are_named(site: Path) -> None:
    install(site, "typo", "srv.platform", "mine", manifest_source("mine"))
    install(site, "acme", "srv.backends.attention", "absent.fast", BACKEND)
    typo = plugins_of("srv-typo")
    assert (typo.state, typo.detail) == ("warning", "this srv reads no entry-point group srv.platform")
    assert "srv.platforms" in typo.remedy
    assert plugins_of("srv-acme").detail == "priority 50 on platform absent, which is not installed"


def test_platforms_that_are_not_asked_for_are_not_loaded(site: Path) -> None:
    install(site, "wreck", "srv.platforms", "wreck", "raise RuntimeError('half installed')")
    states = {
        plugin.name: plugin.state for plugin in installed_plugins(frozenset({"cpu"})) if plugin.family == "platform"
    }
    assert (states["cpu"], states["wreck"]) == ("ok", "not examined")


def test_a_backend_that_takes_over_a_slot_is_named_with_its_distribution(
    site: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In the plan, in its JSON and in the log of a launch."""
    install(site, "acme", "srv.backends.attention", "cpu.fast", BACKEND)
    plan = ["plan", "--device", "cpu:avx512"]
    assert main(plan) == 0
    shown = "decode_attention_backend = fast of srv-acme 3.2.1 because it has the highest priority (50)"
    assert shown in " ".join(capsys.readouterr().out.split())
    assert main([*plan, "--json"]) == 0
    backends = json.loads(capsys.readouterr().out)["backends"]
    assert [backends[slot]["distribution"] for slot in ("decode_attention_backend", "sampling_backend")] == [
        "srv-acme 3.2.1",
        None,
    ]
    context = resolve_launch(user(device="cpu"))
    with caplog.at_level("INFO", "srv.launch"):
        log_provenance(context)
    assert "decode_attention_backend = fast of srv-acme 3.2.1," in caplog.text

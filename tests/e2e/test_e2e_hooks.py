"""A plugin of hooks in a real server: both processes call it, and it sees the engine start, work and stop."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from e2e_support import Server, launch
from hook_plugins_small import example, write_hooks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_hooks_are_called_in_both_processes(tmp_path: Path, letters_model: Path) -> None:
    site, seen = tmp_path / "site", tmp_path / "seen"
    site.mkdir()
    write_hooks(site, example())
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    server = Server(
        ["--device", "cpu", "--model-path", str(letters_model), "--load-format", "dummy", "--disable-graphs"],
        tmp_path / "log",
        environment={"PYTHONPATH": path, "SRV_AUDIT_FILE": str(seen)},
    )
    server.start()
    try:
        server.generate(text="ab", sampling_params={"max_new_tokens": 3, "ignore_eos": True})
        information = server.get("/get_server_info").json()
        assert information["arguments"]["audit_file"]["because"] == "set by environment SRV_AUDIT_FILE"
        assert information["engine"]["hooks_switched_off"] == {}
        server.terminate()
        assert server.wait() == 0
    finally:
        server.kill()
    events = [json.loads(line) for line in seen.read_text().splitlines()]
    of_engine = [event for event in events if event["process"] == "engine"]
    assert [event["event"] for event in (of_engine[0], of_engine[1], of_engine[-1])] == [
        "engine_started",
        "step",
        "engine_stopped",
    ]
    assert of_engine[0]["pages"][0] > 0
    assert of_engine[-1]["reason"] == "stopped"
    assert sum(event.get("generated", 0) for event in of_engine) == 3
    assert [event["event"] for event in events if event["process"] == "api"] == ["started", "first_token", "finished"]


def test_a_faulty_plugin_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hooks(tmp_path, "from srv.hooks import hookimpl\n\n@hookimpl\ndef srv_setup(event): pass\n", attribute="")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    status, stderr, _ = launch("--device", "cpu")
    assert status == 2
    assert "plugin srv-audit: audit: Plugin 'audit' for hook 'srv_setup'" in stderr

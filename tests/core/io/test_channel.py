"""Channels: messages arrive unchanged and in order, through sockets in a private directory."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from srv.io.channel import ApiChannel, EngineChannel, SocketDirectory
from srv.io.messages import Abort, FlushCache, Flushed, FromEngine, ToEngine
from srv.types import RequestSpec, SamplingParams

TO_ENGINE: list[ToEngine] = [
    RequestSpec(id="a", tokens=(1, 2, 3), params=SamplingParams(max_tokens=4, logit_bias=((7, -1.5),))),
    Abort(None),
    FlushCache(3),
]


async def exchange(directory: SocketDirectory) -> tuple[list[ToEngine], FromEngine]:
    api = ApiChannel(directory)
    engine = EngineChannel(directory.to_engine, directory.from_engine)
    try:
        for message in TO_ENGINE:
            await api.send(message)
        received: list[ToEngine] = []
        while len(received) < len(TO_ENGINE):
            received += await asyncio.to_thread(engine.receive, 5.0)
        engine.send(Flushed(3, True))
        return received, await asyncio.wait_for(api.receive(), 5.0)
    finally:
        engine.close()
        api.close()


def test_messages_arrive_complete_and_in_order() -> None:
    directory = SocketDirectory()
    received, answer = asyncio.run(exchange(directory))
    assert received == TO_ENGINE
    assert answer == Flushed(3, True)
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    directory.close()
    assert not directory.path.exists()


def test_directories_of_dead_servers_are_removed_and_those_of_living_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from srv.io.channel import SocketDirectory as D; import os; print(D().path, flush=True); os._exit(9)"
    dead = Path(subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)},
                               capture_output=True, text=True, timeout=60, check=False).stdout.strip())  # fmt: skip
    (foreign := tmp_path / "srv-of-another-program").mkdir()
    assert dead.parent == tmp_path
    assert dead.is_dir()
    living = SocketDirectory()
    assert not dead.exists()
    second = SocketDirectory()
    assert living.path.is_dir()
    assert foreign.is_dir()
    living.close()
    second.close()


def test_directories_of_other_users_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They look as if their server were dead, and this process might be allowed to remove them."""
    (foreign := tmp_path / "srv-of-somebody").mkdir()
    (foreign / "lock").touch()
    (folder := tmp_path / "srv-own").mkdir()
    (folder / "lock").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    SocketDirectory().close()
    assert foreign.is_dir()
    assert folder.is_dir()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    SocketDirectory().close()
    assert not folder.exists()


def test_a_pipe_in_the_place_of_a_lock_delays_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user may put one into the temporary directory, and opening a pipe waits for somebody to write to it."""
    (trap := tmp_path / "srv-trap").mkdir()
    os.mkfifo(trap / "lock")
    (linked := tmp_path / "srv-linked").mkdir()
    (linked / "lock").symlink_to(trap / "lock")
    (tmp_path / "srv-link").symlink_to(trap)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = threading.Thread(target=lambda: SocketDirectory().close(), daemon=True)
    opened.start()
    opened.join(10)
    waits = opened.is_alive()
    if waits:
        os.close(os.open(trap / "lock", os.O_WRONLY | os.O_NONBLOCK))
    assert not waits
    assert (trap / "lock").exists()
    assert linked.is_dir()


def test_a_temporary_directory_with_a_long_name_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (deep := tmp_path / ("d" * 60) / ("e" * 60)).mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory = SocketDirectory()
    received, _ = asyncio.run(exchange(directory))
    assert received == TO_ENGINE
    assert list(deep.iterdir()) == []
    directory.close()

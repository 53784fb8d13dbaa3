"""How batches end: at the deadline, with the server or its engine, and what of their results remains."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from batch_support import LONG, begin, counted, ended, jsonl, line, long_and_short, results, start, upload, used
from server_support import eventually, serving

from srv.errors import RequestError
from srv.server.batches import runner as runner_module
from srv.server.batches.files import BatchFile, FileStore, FileWriter
from srv.server.batches.runner import Batch, BatchRunner
from srv.server.graceful import GracefulServer
from srv.server.http.access import Caller
from srv.testing.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def test_a_shutdown_fails_the_batch_once(tmp_path: Path) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        server.engine.hold = True
        batch = await start(server, *(line(f"{index}", prompt="a") for index in range(100)))
        await eventually(lambda: len(server.engine.running) == runner_module.MAX_LINES_AT_ONCE)
        server.app.state.lifecycle.begin_drain()
        server.engine.hold = False
        batch = await ended(server, batch)
        assert batch["status"] == "failed"
        assert [error["code"] for error in batch["errors"]["data"]] == ["shutting_down"]
        # Those that ran have ended; the others can be sent again.
        served = runner_module.MAX_LINES_AT_ONCE
        assert batch["request_counts"] == {"total": 100, "completed": served, "failed": 0}
        assert len(await results(server, batch["output_file_id"])) == served


async def test_a_shutdown_waits_for_the_files_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = FileWriter.finish

    def on_a_slow_disk(writer: FileWriter) -> BatchFile:
        time.sleep(0.5)
        return finish(writer)

    monkeypatch.setattr(FileWriter, "finish", on_a_slow_disk)
    async with serving(long_and_short(), file_storage_path=tmp_path) as server:
        batch = await start(server, line("good", prompt="short"), *(line(f"{index}", **LONG) for index in range(100)))
        await counted(server, batch, completed=1)
        app = server.app
        config = uvicorn.Config(app, log_level="warning", lifespan="off", port=0)
        stopping = GracefulServer(config, app.state.lifecycle, 0.05, app.state.service.preprocessor.close)
        serve = asyncio.create_task(stopping.serve())
        await eventually(lambda: stopping.started)
        stopping.handle_exit(signal.SIGTERM, None)  # the lines that run are aborted after 0.05 s
        await serve
        assert [file.filename for file in FileStore(tmp_path).all("")].count(f"{batch['id']}_output.jsonl") == 1
        shown = (await server.http.get(f"/v1/batches/{batch['id']}")).json()
        assert (shown["status"], shown["error_file_id"]) == ("failed", None)
        assert shown["request_counts"] == {"total": 101, "completed": 1, "failed": 0}
        assert list(await results(server, shown["output_file_id"])) == ["good"]


async def test_the_end_of_the_event_loop_keeps_results(tmp_path: Path) -> None:
    async with serving(long_and_short(), file_storage_path=tmp_path) as server:
        batch = await start(server, line("good", prompt="short"), *(line(f"{index}", **LONG) for index in range(100)))
        await counted(server, batch, completed=1)
        for task in server.app.state.lifecycle.kept:
            task.cancel()
        await server.app.state.lifecycle.settle()
        shown = (await server.http.get(f"/v1/batches/{batch['id']}")).json()
        assert (shown["status"], shown["errors"]["data"][0]["code"]) == ("failed", "shutting_down")
        assert list(await results(server, shown["output_file_id"])) == ["good"]


async def test_a_dead_engine_fails_the_batch_once(tmp_path: Path) -> None:
    async with serving(FakeEngine(hold=True), file_storage_path=tmp_path) as server:
        batch = await start(server, *(line(f"{index}", prompt="a") for index in range(100)))
        await eventually(lambda: len(server.engine.running) == runner_module.MAX_LINES_AT_ONCE)
        server.engine.die()
        batch = await ended(server, batch)
        assert batch["status"] == "failed"
        assert [error["code"] for error in batch["errors"]["data"]] == ["engine_dead"]
        assert batch["request_counts"] == {"total": 100, "completed": 0, "failed": 0}
        assert batch["output_file_id"] is batch["error_file_id"] is None


async def test_lines_that_have_not_begun_in_time_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "WINDOW_SECONDS", -1)
    async with serving(file_storage_path=tmp_path) as server:
        batch = await ended(server, await start(server, line("a"), line("b")))
        assert (batch["status"], batch["output_file_id"]) == ("expired", None)
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 0}
        assert batch["expired_at"]
        assert not server.engine.received


async def test_a_line_waits_while_the_queue_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "RETRY_SECONDS", 0.01)
    async with serving(file_storage_path=tmp_path) as server:
        server.engine.request_error = ("queue_full", "the queue is full")
        batch = await start(server, line("a"), line("b"))
        await eventually(lambda: len(server.engine.received) > 4)
        server.engine.request_error = None
        batch = await ended(server, batch)
        assert (batch["status"], batch["request_counts"]["completed"], batch["error_file_id"]) == ("completed", 2, None)


async def test_only_a_full_queue_makes_a_line_wait(tmp_path: Path) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        file = await upload(server, jsonl(line("a", prompt="a" * 20_000), line("b")))
        server.app.state.service.bodies.take(server.app.state.service.settings.max_held_request_bytes - 10_000)
        batch = await ended(server, await begin(server, file))
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
        (entry,) = (await results(server, batch["error_file_id"])).values()
        assert (entry["custom_id"], entry["response"]["status_code"]) == ("a", 503)
        assert entry["response"]["body"]["error"]["code"] == "too_many_bytes_held"


async def test_lines_that_run_at_the_deadline_are_served_and_end_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = runner_module.MAX_LINES_AT_ONCE
    for lines, status in ((at_once, "completed"), (at_once + 4, "expired")):
        async with serving(FakeEngine(hold=True), file_storage_path=tmp_path) as server:
            monkeypatch.setattr(runner_module, "WINDOW_SECONDS", 3600)
            batch = await start(server, *(line(f"{index}") for index in range(lines)))
            await eventually(lambda server=server: len(server.engine.running) == at_once)
            monkeypatch.setattr(runner_module, "WINDOW_SECONDS", -1)
            ending = next(iter(server.engine.running))
            await server.post("/abort_request", rid=ending.split(".")[0])
            await counted(server, batch, completed=1)
            shown = (await server.http.get(f"/v1/batches/{batch['id']}")).json()
            assert (shown["status"], shown["expired_at"]) == ("in_progress", None)  # others still run
            server.engine.hold = False
            batch = await ended(server, batch)
            assert batch["status"] == status
            assert batch["request_counts"] == {"total": lines, "completed": at_once, "failed": 0}
            assert len(await results(server, batch["output_file_id"])) == at_once


async def test_a_file_that_vanishes_fails_the_batch_with_the_reason(tmp_path: Path) -> None:
    async with serving(FakeEngine(hold=True), file_storage_path=tmp_path) as server:
        batch = await start(server, *(line(f"{index}") for index in range(40)))
        await eventually(lambda: len(server.engine.running) == runner_module.MAX_LINES_AT_ONCE)
        (tmp_path / f"{batch['input_file_id']}.data").unlink()  # by somebody else
        server.engine.hold = False
        batch = await ended(server, batch)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_storage_failed")
        assert "No such file" in batch["errors"]["data"][0]["message"]
        assert (await server.http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200


async def test_results_count_towards_the_storage_as_long_as_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    monkeypatch.setattr("srv.server.app.FileStore", lambda folder, shared: store)
    async with serving(file_storage_path=tmp_path) as server:
        batch = await ended(server, await start(server, line("a"), line("b", n=0)))
        listed = (await server.http.get("/v1/files")).json()["data"]
        assert len(listed) == 3
        assert used(store) == used(FileStore(tmp_path)) == sum(file["bytes"] for file in listed)
        for file in listed:
            assert (await server.http.delete(f"/v1/files/{file['id']}")).status_code == 200
        assert used(store) == 0
        assert batch["status"] == "completed"


async def test_a_file_is_kept_from_the_moment_at_which_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, create = FileStore(tmp_path), BatchRunner.create
    monkeypatch.setattr("srv.server.app.FileStore", lambda folder, shared: store)

    def while_it_is_deleted(runner: BatchRunner, caller: Caller, file: BatchFile, *rest: Any) -> Batch:
        with pytest.raises(RequestError, match="a batch or a download reads it"):
            store.delete(caller.owner, file.id)
        return create(runner, caller, file, *rest)

    monkeypatch.setattr(BatchRunner, "create", while_it_is_deleted)
    async with serving(file_storage_path=tmp_path) as server:
        batch = await ended(server, await start(server, line("a")))
        assert batch["status"] == "completed"
        store.delete("", batch["input_file_id"])


async def test_a_batch_keeps_its_results_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No new byte can be written then, neither of a result nor of what says that there is a file."""
    write, write_bytes, full = FileWriter._write, Path.write_bytes, False

    def check_space() -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_result(writer: FileWriter, data: bytes) -> None:
        check_space()
        write(writer, data)

    def write_file(path: Path, data: bytes) -> int:
        check_space()
        return write_bytes(path, data)

    monkeypatch.setattr(FileWriter, "_write", write_result)
    monkeypatch.setattr(Path, "write_bytes", write_file)
    async with serving(long_and_short(), file_storage_path=tmp_path) as server:
        batch = await start(server, line("good", prompt="short"), *(line(f"{index}", **LONG) for index in range(20)))
        await counted(server, batch, completed=1)
        full = True
        server.app.state.lifecycle.abort(None)
        batch = await ended(server, batch)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_storage_failed")
        assert list(await results(server, batch["output_file_id"])) == ["good"]
    async with serving(file_storage_path=tmp_path) as server:
        assert list(await results(server, batch["output_file_id"])) == ["good"]
    store = FileStore(tmp_path)
    with pytest.raises(RequestError, match="No space left"):
        store.writer("", "more", "batch")
    assert len(list(tmp_path.glob("*.data"))) == len(list(tmp_path.glob("*.json")))


async def test_batches_that_are_forgotten_are_those_of_the_key_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_KEPT", 3)
    runner = object.__new__(BatchRunner)
    owners = {"a1": "a", "b1": "b", "b2": "b", "b3": "b", "b4": "b"}
    statuses = {"b2": "in_progress"}
    batches: dict[str, Any] = {
        name: SimpleNamespace(status=statuses.get(name, "failed"), caller=SimpleNamespace(owner=owner))
        for name, owner in owners.items()
    }
    runner._batches = batches
    runner._forget()
    assert list(batches) == ["a1", "b2", "b4"]

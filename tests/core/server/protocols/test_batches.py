"""`/v1/batches` over the fake engine, most of it through OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_support import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    LONG,
    RESPONSES,
    counted,
    ended,
    jsonl,
    line,
    long_and_short,
    results,
    start,
    upload,
    used,
)
from every import every
from httpx import Response
from server_support import Serving, eventually, listening, serving

from srv.server.batches import runner as runner_module
from srv.server.batches.files import FileStore
from srv.server.http.access import Access
from srv.server.http.client_keys import ClientKey
from srv.testing.fake_engine import FakeEngine
from srv.types import RequestSpec

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def client_of(server: Serving) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_a_batch_through_the_client_of_openai(tmp_path: Path) -> None:
    async with listening(file_storage_path=tmp_path / "files") as server, client_of(server) as client:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        data = jsonl(line("good", CHAT, **chat), line("bad", CHAT, messages=[]), line("other", CHAT, **chat, n=2))
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        assert (file.filename, file.bytes, file.purpose, file.status) == ("in.jsonl", len(data), "batch", "processed")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "7"}
        )
        assert (batch.metadata, batch.endpoint, batch.input_file_id) == ({"job": "7"}, CHAT, file.id)
        async with asyncio.timeout(20):
            while batch.status != "completed":
                batch = await client.batches.retrieve(batch.id)
                assert batch.status in ("validating", "in_progress", "finalizing", "completed")
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
        assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.completed_at or 0) < (batch.expires_at or 0)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        lines = (await client.files.content(batch.output_file_id)).text.splitlines()
        answers = {entry["custom_id"]: entry["response"] for entry in map(json.loads, lines)}
        assert sorted(answers) == ["good", "other"]
        assert answers["good"]["status_code"] == 200
        assert answers["good"]["body"]["choices"][0]["message"]["content"] == "Th"
        assert len(answers["other"]["body"]["choices"]) == 2
        (error,) = map(json.loads, (await client.files.content(batch.error_file_id)).text.splitlines())
        assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
        assert error["response"]["body"]["error"]["param"] == "messages"
        assert [listed_batch.id async for listed_batch in client.batches.list(limit=1)] == [batch.id]
        listed = {listed_file.id: listed_file.purpose async for listed_file in client.files.list(limit=2)}
        assert listed == {
            file.id: "batch",
            **dict.fromkeys((batch.output_file_id, batch.error_file_id), "batch_output"),
        }
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        assert (await client.files.retrieve(batch.output_file_id)).bytes == sum(len(text) + 1 for text in lines)


@every(
    ("endpoint", "body", "shown"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 3}, lambda body: body["choices"][0]["text"] == "The"),
        (EMBEDDINGS, {"input": "abc"}, lambda body: len(body["data"][0]["embedding"]) == 4),
    ],
)
async def test_every_line_is_answered_and_counted(
    tmp_path: Path, endpoint: str, body: dict[str, Any], shown: Callable[[dict[str, Any]], bool]
) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        names = [f"line {number}" for number in range(40)]
        batch = await ended(
            server, await start(server, *(line(name, endpoint, **body) for name in names), endpoint=endpoint)
        )
        assert (batch["status"], batch["error_file_id"]) == ("completed", None)
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        entries = await results(server, batch["output_file_id"])
        assert sorted(entries) == sorted(names)
        assert all(shown(entry["response"]["body"]) for entry in entries.values())
        metrics = (await server.http.get("/metrics")).text
        assert (
            f'srv_sequences_total{{finish_reason="{"stop" if endpoint == EMBEDDINGS else "length"}"}} 40.0' in metrics
        )


async def test_few_lines_run_at_once_and_belong_to_one_owner_of_their_own(tmp_path: Path) -> None:
    async with serving(FakeEngine(hold=True), file_storage_path=tmp_path) as server:
        batches = [await start(server, *(line(f"{index}", prompt="a") for index in range(30))) for _ in range(2)]
        await eventually(lambda: len(server.engine.running) == runner_module.MAX_LINES_AT_ONCE)
        urgent = asyncio.create_task(server.http.post(COMPLETIONS, json={"prompt": "now"}, headers={"x-api-key": "a"}))
        await eventually(lambda: len(server.engine.running) == runner_module.MAX_LINES_AT_ONCE + 1)
        specs = [message for message in server.engine.received if isinstance(message, RequestSpec)]
        assert len({spec.owner for spec in specs[:-1]}) == 1
        assert specs[-1].owner not in ("", specs[0].owner)
        for batch in batches:
            await server.http.post(f"/v1/batches/{batch['id']}/cancel")
        server.engine.hold = False
        assert [(await ended(server, batch))["status"] for batch in batches] == ["cancelled", "cancelled"]
        assert (await urgent).status_code == 200


async def test_lines_of_responses_are_stored_for_the_key_of_the_batch(tmp_path: Path) -> None:
    async with serving(file_storage_path=tmp_path) as server:

        async def answers(key: str, **more: Any) -> dict[str, Any]:
            server.http.headers["x-api-key"] = key
            body = {"input": "x", "max_output_tokens": 2, **more}
            batch = await start(server, line("a", RESPONSES, **body), endpoint=RESPONSES)
            done_batch = await ended(server, batch)
            entry = (await results(server, done_batch["output_file_id"] or done_batch["error_file_id"]))["a"]
            return dict(entry["response"]["body"])

        first = await answers("one")
        assert first["output"][0]["content"][0]["text"] == "Th"
        assert (await answers("one", previous_response_id=first["id"]))["previous_response_id"] == first["id"]
        assert (await server.http.get(f"/v1/responses/{first['id']}")).json() == first
        refused = await answers("two", previous_response_id=first["id"])
        assert refused["error"]["code"] == "previous_response_not_found"
        assert (await server.http.get(f"/v1/responses/{first['id']}")).status_code == 404


async def test_a_cancelled_batch_frees_everything(tmp_path: Path) -> None:
    async with serving(FakeEngine(hold=True), file_storage_path=tmp_path) as server:
        engine = server.engine
        batch = await start(server, *(line(f"{index}") for index in range(50)))
        await eventually(lambda: len(engine.running) == runner_module.MAX_LINES_AT_ONCE)
        refused = await server.http.delete(f"/v1/files/{batch['input_file_id']}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "file_in_use")
        cancelling = (await server.http.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelling["status"] == "cancelling"
        assert cancelling["cancelling_at"]
        batch = await ended(server, batch)
        assert (batch["status"], batch["request_counts"]["total"]) == ("cancelled", 50)
        await eventually(lambda: not engine.running)
        assert server.app.state.lifecycle.active == 0
        assert server.app.state.service.bodies.held == 0
        again = await server.http.post(f"/v1/batches/{batch['id']}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "batch_ended")
        assert (await server.http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200
        assert [path.suffix for path in tmp_path.iterdir()] == []


async def test_results_before_the_cancellation_are_kept(tmp_path: Path) -> None:
    async with serving(long_and_short(), file_storage_path=tmp_path) as server:
        lines = [line("good", prompt="short"), line("bad", n=0), *(line(f"{index}", **LONG) for index in range(20))]
        batch = await start(server, *lines)
        await counted(server, batch, completed=1, failed=1)
        await server.http.post(f"/v1/batches/{batch['id']}/cancel")
        batch = await ended(server, batch)
        assert batch["status"] == "cancelled"
        assert batch["request_counts"] == {"total": 22, "completed": 1, "failed": 1}
        (entry,) = (await results(server, batch["output_file_id"])).values()
        assert (entry["custom_id"], entry["response"]["body"]["choices"][0]["text"]) == ("good", "ab")
        assert list(await results(server, batch["error_file_id"])) == ["bad"]


@every(
    ("lines", "message", "number"),
    [
        ([b""], "the file is empty", None),
        ([b"\n \n"], "the file is empty", None),
        ([b"{"], "the line is not a request", 1),
        ([b"\xff\xfe"], "the line is not a request", 1),
        ([b"[" * 100_000], "the line is not a request", 1),
        ([b"7"], "the line is not a request", 1),
        ([json.dumps({**line("a"), "extra": 1}).encode()], "unknown field `extra`", 1),
        ([json.dumps(line("")).encode()], "custom_id must have 1 to 512", 1),
        ([json.dumps(line("x" * 513)).encode()], "custom_id must have 1 to 512", 1),
        ([json.dumps(line("a")).encode()] * 2, "'a' occurs twice", 2),
        ([json.dumps({**line("a"), "method": "GET"}).encode()], "method must be POST", 1),
        ([json.dumps(line("a", "/v1/files")).encode()], "url must be /v1/completions", 1),
        ([json.dumps(line("a", "../../etc/passwd")).encode()], "url must be /v1/completions", 1),
        ([json.dumps({**line("a"), "body": []}).encode()], "body must be a JSON object", 1),
        ([json.dumps(line("a", prompt="b", stream=True)).encode()], "stream is refused", 1),
        ([json.dumps(line("a", prompt=[0] * 200_000)).encode()], "more than 131072 JSON values", 1),
        ([b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"a": NaN}}'], "not a request", 1),
    ],
)
async def test_a_hostile_file_fails_the_batch_with_its_line(
    tmp_path: Path, lines: Sequence[bytes], message: str, number: int | None
) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        file = await upload(server, b"\n".join(lines))
        body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = await ended(server, (await server.post("/v1/batches", **body)).json())
        assert batch["status"] == "failed"
        (error,) = batch["errors"]["data"]
        assert message in error["message"]
        assert error["line"] == number
        assert not server.engine.received
        assert batch["output_file_id"] is batch["error_file_id"] is None


async def test_the_first_hundred_problems_are_named(tmp_path: Path) -> None:
    async with serving(file_storage_path=tmp_path) as server:
        batch = await ended(server, await start(server, *([7] * 500)))
        assert [error["line"] for error in batch["errors"]["data"]] == list(range(1, 101))


async def test_a_batch_whose_results_do_not_fit_fails_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, max_bytes=8000)
    monkeypatch.setattr("srv.server.app.FileStore", lambda folder, shared: store)
    async with serving(file_storage_path=tmp_path) as server:
        batch = await ended(server, await start(server, *(line(f"{index}", prompt="a") for index in range(40))))
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "file_storage_full"
        assert 0 < batch["request_counts"]["completed"] < 40
        assert len(await results(server, batch["output_file_id"])) == batch["request_counts"]["completed"]
        assert server.app.state.lifecycle.active == 0
        assert used(store) == sum(path.stat().st_size for path in tmp_path.glob("*.data"))


async def test_more_batches_than_the_limit_are_refused(tmp_path: Path) -> None:
    async with serving(FakeEngine(hold=True), file_storage_path=tmp_path) as server:
        share, whole = runner_module.MAX_OPEN_PER_OWNER, runner_module.MAX_OPEN
        body = {"endpoint": COMPLETIONS, "completion_window": "24h"}

        async def create(key: str) -> Response:
            file = await upload(server, jsonl(line("a")), key=key)
            return await server.http.post(
                "/v1/batches", json={"input_file_id": file, **body}, headers={"x-api-key": key}
            )

        created: list[tuple[str, str]] = []
        for owner in range(whole // share):
            created += [(f"{owner}", (await create(f"{owner}")).json()["id"]) for _ in range(share)]
            if owner == 0:
                refused = await create("0")  # others have their share still
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
                assert f"{share} is the limit of one API key" in refused.json()["error"]["message"]
        refused = await create("last")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
        assert f"{whole} is the limit of all clients together" in refused.json()["error"]["message"]
        file = (await server.http.get("/v1/files", headers={"x-api-key": "last"})).json()["data"][0]["id"]
        assert (await server.http.delete(f"/v1/files/{file}", headers={"x-api-key": "last"})).status_code == 200
        for key, batch in created:
            await server.http.post(f"/v1/batches/{batch}/cancel", headers={"x-api-key": key})
        await eventually(lambda: not server.engine.running)
        assert (await create("last")).status_code == 200


async def test_the_limits_of_a_key_hold_for_the_lines_of_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "RETRY_SECONDS", 0.01)
    keys = (ClientKey("slow", "one", concurrent_requests=2), ClientKey("free", "two"))
    async with serving(FakeEngine(hold=True), file_storage_path=tmp_path, access=Access(clients=keys)) as server:
        batches = {}
        for key in ("slow", "free"):
            server.http.headers["x-api-key"] = key
            batches[key] = await start(server, *(line(f"{index}") for index in range(6)))
        await eventually(lambda: len(server.engine.running) == 2 + 6)
        spaces = {message.namespace for message in server.engine.received if isinstance(message, RequestSpec)}
        assert len(spaces) == 2  # of the prefix cache
        server.http.headers["x-api-key"] = "slow"
        refused = await server.http.post(COMPLETIONS, json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        server.engine.hold = False
        assert (await ended(server, batches["slow"]))["request_counts"]["completed"] == 6

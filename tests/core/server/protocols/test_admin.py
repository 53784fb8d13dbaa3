"""Models, tokenization, health, API key, metrics, cache, draining and a dead engine, as a client sees them."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_support import CONTEXT, MODEL, events_of, eventually, listening, serving, settings

from srv.commands import Answer, ReadExpertCounts, StartExpertCounts, StopExpertCounts
from srv.io.messages import Control, Controlled, ToEngine
from srv.server.http.access import OPEN_PATHS, Access
from srv.server.request.sampling_fields import Sampling
from srv.testing.fake_engine import HIDDEN, FakeEngine
from srv.types import FinishReason, RequestSpec
from srv.worker.expert_counts import ExpertRecorder
from srv.worker.rank import NO_RECORDER

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "hi"}]


async def test_models() -> None:
    async with serving() as server:
        listed = (await server.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert listed["data"][0]["id"] == MODEL
        assert listed["data"][0]["max_model_len"] == CONTEXT
        assert (await server.http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
        missing = await server.http.get("/v1/models/some/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize() -> None:
    async with serving() as server:
        assert (await server.post("/tokenize", prompt="aé")).json() == {
            "tokens": [97, 0xC3, 0xA9],
            "count": 3,
            "max_model_len": CONTEXT,
        }
        many = (await server.post("/tokenize", prompt=["a", "bc"], return_token_strs=True)).json()
        assert many["tokens"] == [[97], [98, 99]]
        assert many["count"] == [1, 2]
        assert many["token_strs"] == [["a"], ["b", "c"]]
        chat = (await server.post("/tokenize", messages=HELLO)).json()
        assert bytes(chat["tokens"]) == b"user: hi\nassistant: "
        begun = {"messages": [*HELLO, {"role": "assistant", "content": "I"}], "continue_final_message": True}
        continued = (await server.post("/tokenize", **begun, add_generation_prompt=False)).json()
        assert bytes(continued["tokens"]) == b"user: hi\nassistant: I"
        assert (await server.post("/tokenize", prompt="x" * 1000)).json()["count"] == 1000  # longer than the context
        assert (await server.post("/detokenize", tokens=[97, 258, 98])).json() == {"text": "ab"}
        assert (await server.post("/detokenize", tokens=[97, 258], skip_special_tokens=False)).json() == {
            "text": "a<258>"
        }
        assert (await server.post("/detokenize", tokens=[[97], [98]])).json() == {"text": ["a", "b"]}
        assert (await server.post("/detokenize", tokens=[])).json() == {"text": ""}


class RecordingEngine(FakeEngine):
    """Its recorder of the usage of experts is the worker's, for one layer of two experts that computes nothing."""

    recorder: ExpertRecorder | None = None

    async def send(self, message: ToEngine) -> None:
        match message:
            case Control(call, StartExpertCounts() | StopExpertCounts() | ReadExpertCounts() as command):
                answer = Answer(error=NO_RECORDER) if self.recorder is None else self.recorder.run(command)
                self._outbox.put_nowait(Controlled(call, [answer]))
            case _:
                await super().send(message)


async def test_each_refusal_of_the_record_of_experts_says_what_was_not_done() -> None:
    engine = RecordingEngine()

    async def message(action: str) -> tuple[int, str]:
        response = await server.post(f"/{action}_expert_distribution_record")
        return response.status_code, response.json().get("error", {}).get("message", "")

    async with serving(engine) as server:
        status, why = await message("dump")
        assert (status, why.startswith(f"the record of the usage of experts was not read: {NO_RECORDER}")) == (
            400,
            True,
        )
        layer: Any = SimpleNamespace(experts=SimpleNamespace(sizes=SimpleNamespace(experts=2)))
        engine.recorder = ExpertRecorder({0: layer}, "stat", None, torch.device("cpu"))
        status, why = await message("stop")
        assert why.startswith("the record of the usage of experts was not stopped: no record is being made")
        assert await message("start") == (200, "")
        status, why = await message("start")
        assert why.startswith("the record of the usage of experts was not started: a record is being made already;")
        assert await message("dump") == (200, "")


async def test_information() -> None:
    async with serving() as server:
        assert (await server.http.get("/get_model_info")).json() == {
            "model_path": "/models/tiny",
            "max_request_tokens": settings().request_token_limit,
            "hidden_size": HIDDEN,
            "is_embedding": True,
            "pooling": "last",
            "generates": True,
            "labels": [],
        }
        info = (await server.http.get("/get_server_info")).json()
        assert info["args"]["page_size"]["story"] == "because generic default"
        assert info["engine"]["pages_total"] == 1000
        assert info["draining"] is False
        assert (info["memory"], info["startup"]) == ([], [])
        document = (await server.http.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        assert "temperature" in schemas["ChatBody"]["properties"]
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
        assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatBody"}


async def test_an_inert_feature_shows_in_health_information_and_metrics() -> None:
    """Once the engine reports it, `/health` has its name and `/get_server_info` the reason."""
    reason = "none of 900 prompt tokens was found in it. Let prompts begin with what they share."
    async with serving() as server:
        before = (await server.http.get("/metrics")).text
        assert 'srv_feature_inert{feature="prefix_cache"}' not in before
        server.engine.inert = {"prefix_cache": reason}
        assert (await server.http.get("/get_server_info")).json()["engine"]["inert"] == {"prefix_cache": reason}
        assert (await server.http.get("/health")).json() == {"status": "ok", "inert_features": ["prefix_cache"]}
        assert sample((await server.http.get("/metrics")).text, 'srv_feature_inert{feature="prefix_cache"}') == 1


async def test_health_generate_generates_a_token() -> None:
    async with serving(health_generate_seconds=0.1) as server:
        assert (await server.http.get("/health")).json() == {"status": "ok"}
        assert (await server.http.get("/health_generate")).status_code == 200
        assert server.engine.stats(0).generated_tokens == 1
        server.engine.hold = True
        slow = await server.http.get("/health_generate")
        assert (slow.status_code, slow.json()["error"]["code"]) == (503, "engine_slow")
        await eventually(lambda: not server.engine.running)
        assert (await server.http.get("/health")).status_code == 200


async def test_api_key_is_required_except_at_open_paths() -> None:
    async with serving(access=Access(key="sécret")) as server:
        for path in ("/v1/models", "/get_server_info", "/health_generate", "/openapi.json", "/nothing"):
            response = await server.http.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer other", "Bearer", "Basic x", "sécret", "Bearer sécre", "Bearer sécrett", "Bearer sècret"):
            response = await server.http.get("/v1/models", headers={"authorization": wrong.encode()})
            assert response.status_code == 401, wrong
        for path in sorted(OPEN_PATHS):
            assert (await server.http.get(path)).status_code == 200
        headers = {"authorization": "Bearer sécret".encode()}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == 200


async def test_flush_cache_is_refused_while_requests_run() -> None:
    async with serving() as server:
        assert (await server.http.post("/flush_cache")).json() == {"flushed": True}
        server.engine.hold = True
        task = asyncio.create_task(server.post("/generate", text="a", rid="x"))
        await eventually(lambda: server.engine.running)
        response = await server.http.post("/flush_cache")
        assert response.status_code == 400
        assert (await server.http.get("/flush_cache")).status_code == 405  # a web page can make a browser send a GET
        assert "requests are running" in response.json()["error"]["message"]
        await server.post("/abort_request", rid="x")
        await task


def sample(text: str, name: str) -> float:
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " "))


async def test_metrics_count_what_happened() -> None:
    async with serving() as server:
        await server.post("/v1/completions", prompt="abcd", max_tokens=5)
        await server.post("/v1/completions", prompt="abcd", max_tokens=5, stop="quick")
        await server.post("/v1/completions", prompt="", max_tokens=5)
        server.engine.hold = True
        task = asyncio.create_task(server.post("/generate", text="a", rid="x"))
        await eventually(lambda: server.engine.running)
        response = await server.http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = response.text
        assert sample(text, "srv_requests_queued") == 1
        assert sample(text, "srv_requests_running") == 0
        assert sample(text, "srv_kv_pages_total") == 1000
        assert sample(text, "srv_kv_pages_free") + sample(text, "srv_kv_pages_held") == 1000
        assert sample(text, "srv_prompt_tokens_total") == 9
        assert sample(text, "srv_generated_tokens_total") == 10
        assert sample(text, 'srv_step_tokens_bucket{le="1.0"}') == sample(text, "srv_step_tokens_sum") == 10
        labels = 'model_name="tiny",engine="0",le="+Inf"'
        assert sample(text, f"vllm:iteration_tokens_total_bucket{{{labels}}}") == 10
        assert sample(text, "srv_cache_hit_ratio") == 0
        assert sample(text, 'srv_sequences_total{finish_reason="length"}') == 2
        assert sample(text, 'srv_sequences_total{finish_reason="abort"}') == 0
        assert sample(text, "srv_time_to_first_token_seconds_count") == 2
        assert sample(text, "srv_inter_token_seconds_count") == 8
        assert sample(text, "srv_request_seconds_count") == 2
        assert sample(text, 'srv_http_responses_total{status="400"}') == 1
        assert sample(text, "srv_retractions_total") == 0
        assert sample(text, "srv_engine_up") == 1
        await server.post("/abort_request", rid="x")
        await task
        text = (await server.http.get("/metrics")).text
        assert sample(text, 'srv_sequences_total{finish_reason="abort"}') == 1


async def test_an_engine_error_on_one_request_is_a_500_with_its_code() -> None:
    async with serving() as server:
        server.engine.request_error = ("not_finite", "the logits are not finite")
        response = await server.post("/v1/completions", prompt="a")
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "the logits are not finite",
            "type": "server_error",
            "param": None,
            "code": "not_finite",
        }
        streamed = await server.post("/v1/chat/completions", messages=HELLO, n=2, stream=True)
        assert (streamed.status_code, streamed.json()["error"]["code"]) == (500, "not_finite")
        server.engine.request_error = None
        assert (await server.post("/v1/completions", prompt="a")).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("queue_full", 503),
        ("shutting_down", 503),
        ("exceeds_pool", 400),
        ("context_length_exceeded", 400),
        ("empty_prompt", 400),
        ("duplicate_request", 409),
        ("step_failed", 500),
    ],
)
async def test_an_engine_refusal_has_the_status_of_its_code(code: str, status: int, stream: bool) -> None:
    async with serving() as server:
        server.engine.request_error = (code, "the engine's message")
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
            response = await server.post(path, **body, stream=stream)
            assert response.status_code == status
            assert response.json()["error"]["code"] == code
            assert ("retry-after" in response.headers) == (status == 503)


async def test_an_abort_between_admission_and_generation_is_effective() -> None:
    async with serving() as server:
        service = server.app.state.service
        prepared = await service.preprocessor.prepare("a", Sampling(max_tokens=5), param="prompt", default_max_tokens=5)
        ticket, group = service.start([prepared], ["mine"], 0.0)
        assert service.lifecycle.abort(["mine"]) == 1
        (result,) = await group.gather()
        ticket.close()
        assert result.finish is FinishReason.ABORT
        assert not any(isinstance(message, RequestSpec) for message in server.engine.received)
        assert (await server.post("/v1/completions", prompt="a", rid="mine")).status_code == 200


async def test_a_dead_engine_fails_streams_and_new_requests() -> None:
    async with serving(FakeEngine(step_seconds=0.005)) as server:
        streaming = asyncio.create_task(server.stream("/v1/completions", prompt="a", max_tokens=200))
        waiting = asyncio.create_task(server.post("/v1/completions", prompt="a", max_tokens=200))
        await eventually(lambda: len(server.engine.running) == 2)
        await eventually(lambda: server.engine.stats(0).generated_tokens > 4)
        server.engine.die("exit status 139")
        assert (await streaming)[-1]["error"]["code"] == "engine_dead"
        assert (await waiting).status_code == 503
        assert "exit status 139" in (await waiting).json()["error"]["message"]
        later = await server.post("/v1/completions", prompt="a")
        assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_dead")
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.get("/v1/models")).status_code == 200
        assert sample((await server.http.get("/metrics")).text, "srv_engine_up") == 0
        assert server.app.state.lifecycle.active == 0


@pytest.mark.parametrize("over", [serving, listening], ids=["app alone", "behind uvicorn"])
async def test_an_unexpected_exception_is_a_500_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, over: Any
) -> None:
    async with over() as server:
        # uvicorn's loggers do not propagate as it is configured here.
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)

        def broken(*args: object, **kwargs: object) -> str:
            raise ZeroDivisionError("secret detail")

        server.app.state.service.text.apply_chat_template = broken
        response = await server.post("/v1/chat/completions", messages=HELLO)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        logged = [record for record in caplog.records if record.levelname == "ERROR"]
        assert [record.getMessage() for record in logged] == ["POST /v1/chat/completions failed"]
        assert caplog.text.count("ZeroDivisionError: secret detail") == 1
        assert sample((await server.http.get("/metrics")).text, 'srv_http_responses_total{status="500"}') == 1


async def test_drain_refuses_new_requests_and_lets_running_ones_finish() -> None:
    async with serving(FakeEngine(step_seconds=0.01)) as server:
        running = asyncio.create_task(server.post("/v1/completions", prompt="a", max_tokens=10))
        await eventually(lambda: server.engine.running)
        draining = asyncio.create_task(server.app.state.lifecycle.drain(1.0))
        await asyncio.sleep(0)
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
            refused = await server.post(path, **body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) > 0
        assert (await server.http.get("/health")).status_code == 503
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        await draining


async def test_drain_ends_requests_that_exceed_the_grace_period_with_an_error() -> None:
    async with serving(FakeEngine(hold=True)) as server:
        body = {"prompt": "a", "max_tokens": 10}
        streams = [
            asyncio.create_task(server.http.post(path, json={**fields, "stream": True}))
            for path, fields in (("/v1/completions", body), ("/generate", {"text": "a"}))
        ]
        whole = asyncio.create_task(server.post("/v1/completions", **body))
        await eventually(lambda: len(server.engine.running) == 3)
        await server.app.state.lifecycle.drain(0.05)
        for stream in streams:
            *_, last, error = events_of((await stream).text)
            reason = last.get("meta_info", {}).get("finish_reason") or last["choices"][0]["finish_reason"]
            assert reason in ("abort", {"type": "abort", "message": "the server is shutting down"})
            assert error["error"]["code"] == "shutting_down"
        cut = await whole
        assert (cut.status_code, cut.json()["error"]["code"]) == (503, "shutting_down")
        assert server.app.state.lifecycle.active == 0

"""A streaming HTTP server for engines without one: OpenVINO GenAI's pipeline, transformers' `generate`.

    python thin_server.py openvino --model FILE.gguf --port 8001 --threads 2 --pool-tokens 20480
    python thin_server.py transformers --model FILE.gguf --port 8001 --threads 2 --dtype float32

Owns the part of OpenAI's `/v1/completions` that the load client uses: token ids as input, one chunk per output token,
or (`echo`, `logprobs`) the log probabilities of the prompt. Tokens are not detokenized, which favours its engines a
little. It runs in the engine's own environment, so it needs only the standard library. The engine computes in a thread
of its own and returns all new tokens of a step together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

GATHER_S = 0.005  # how long a batch waits for further requests


@dataclass(frozen=True)
class Request:
    """One request to an engine; `score` asks for the prompt's log probabilities instead of new tokens."""

    number: int
    ids: list[int]
    output: int
    score: bool


@dataclass
class Update:
    """The result of a step for one request."""

    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    logprobs: list[float] | None = None
    error: str | None = None


Send = Callable[[Mapping[int, Update]], None]


class Engine(Protocol):
    """An engine's endless loop, run in a thread: takes requests, sends updates."""

    def run(self, requests: queue.SimpleQueue[Request], send: Send) -> None: ...


# ---- OpenVINO GenAI


class OpenVINO:
    """The continuous-batching pipeline, stepped by hand."""

    def __init__(self, model: str, threads: int, pool_tokens: int) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = pool_tokens // 32  # a block has 32 tokens on the CPU
        scheduler.max_num_seqs = 16
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def run(self, requests: queue.SimpleQueue[Request], send: Send) -> None:
        running: dict[int, tuple[Request, Any]] = {}
        while True:
            while not running or not requests.empty():
                request = requests.get()
                running[request.number] = (request, self._add(request))
            self._pipeline.step()
            updates = {number: self._update(*running[number]) for number in running if running[number][1].can_read()}
            for number, update in updates.items():
                if update.finished:
                    del running[number]
            send(updates)

    def _add(self, request: Request) -> Any:
        import numpy as np
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = request.output
        config.ignore_eos = True
        config.do_sample = False
        if request.score:
            config.echo = True
            config.logprobs = 1
        ids = ov.Tensor(np.array([request.ids], dtype=np.int64))
        return self._pipeline.add_request(request.number, ids, config)

    def _update(self, request: Request, handle: Any) -> Update:
        update = Update()
        logprobs: list[float] = []
        while handle.can_read():
            for output in handle.read().values():
                update.tokens += output.generated_ids
                logprobs += output.generated_log_probs
        update.finished = "RUNNING" not in str(handle.get_status())
        if request.score:
            update.logprobs = logprobs[: len(request.ids)]
        return update


# ---- transformers


class Transformers:
    """`generate` on static batches: requests that arrive together run together, later ones wait until those end."""

    def __init__(self, model: str, threads: int, dtype: str) -> None:
        from pathlib import Path

        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        torch.set_num_threads(threads)
        file = Path(model)
        # Dense weights, like ours: transformers would dequantize quantized weights in every step.
        self._model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        ).eval()

    def run(self, requests: queue.SimpleQueue[Request], send: Send) -> None:
        while True:
            batch = [requests.get()]
            while batch:
                try:
                    batch.append(requests.get(timeout=GATHER_S))
                except queue.Empty:
                    break
            for request in [other for other in batch if other.score]:
                send({request.number: Update(finished=True, logprobs=self._score(request))})
            if streams := [other for other in batch if not other.score]:
                self._generate(streams, send)

    def _generate(self, batch: list[Request], send: Send) -> None:
        import torch

        width = max(len(request.ids) for request in batch)
        ids = torch.tensor([[0] * (width - len(request.ids)) + request.ids for request in batch])
        mask = torch.tensor([[0] * (width - len(request.ids)) + [1] * len(request.ids) for request in batch])
        output = max(request.output for request in batch)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=output,
                min_new_tokens=output,
                pad_token_id=0,
                streamer=_Streamer(batch, send),
            )

    def _score(self, request: Request) -> list[float]:
        import torch

        ids = torch.tensor([request.ids])
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(ids, use_cache=False).logits[0, :-1].float(), dim=-1)
        return [0.0, *logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()]


class _Streamer:
    """The streamer interface of transformers: `put` first gets the prompts, then the tokens of a step, one per row."""

    def __init__(self, batch: list[Request], send: Send) -> None:
        self._batch = batch
        self._send = send
        self._made = -1

    def put(self, value: Any) -> None:
        self._made += 1
        if self._made == 0:
            return
        updates = {
            request.number: Update([token], self._made == request.output)
            for request, token in zip(self._batch, value.tolist(), strict=True)
            if self._made <= request.output
        }
        self._send(updates)

    def end(self) -> None:
        """Nothing to do: rows end by their token counts."""


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "openvino": lambda options: OpenVINO(options.model, options.threads, options.pool_tokens),
    "transformers": lambda options: Transformers(options.model, options.threads, options.dtype),
}


# ---- HTTP


class Service:
    """Passes requests from connections to the engine's thread, and its updates back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._answers: dict[int, asyncio.Queue[Update]] = {}
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._engine.run(self._requests, self._send)
        except Exception as error:  # noqa: BLE001 - reported to every client, now and later
            failed = Update(finished=True, error=f"{type(error).__name__}: {error}")
            self._send(dict.fromkeys(list(self._answers), failed))
            while True:
                self._send({self._requests.get().number: failed})

    def _send(self, updates: Mapping[int, Update]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: Mapping[int, Update]) -> None:
        for number, update in updates.items():
            if (answers := self._answers.get(number)) is not None:
                answers.put_nowait(update)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the one request of a connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            lengths = [line.split(":")[1] for line in head if line.lower().startswith("content-length:")]
            content = await reader.readexactly(int(lengths[0]) if lengths else 0)
            path = head[0].split()[1]
            if path == "/health":
                writer.write(_plain(200, {"status": "ok"}))
            elif path == "/v1/completions":
                await self._complete(json.loads(content), writer)
            else:
                writer.write(_plain(404, {"error": f"no such path: {path}"}))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client disconnected
        finally:
            writer.close()

    async def _complete(self, fields: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self._count += 1
        request = Request(self._count, fields["prompt"], fields["max_tokens"], bool(fields.get("echo")))
        answers = self._answers[request.number] = asyncio.Queue()
        self._requests.put(request)
        try:
            await (self._whole if request.score else self._stream)(request, answers, writer)
        finally:
            del self._answers[request.number]

    async def _whole(self, request: Request, answers: asyncio.Queue[Update], writer: asyncio.StreamWriter) -> None:
        update = await answers.get()
        if update.error is not None:
            writer.write(_plain(500, {"error": update.error}))
            return
        assert update.logprobs is not None
        scored = [None, *update.logprobs[1:]]
        writer.write(_plain(200, {"choices": [{"index": 0, "text": "", "logprobs": {"token_logprobs": scored}}]}))

    async def _stream(self, request: Request, answers: asyncio.Queue[Update], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        count = 0
        finished = False
        while not finished:
            update = await answers.get()
            if update.error is not None:
                writer.write(_event({"error": update.error}))
                return
            for token in update.tokens:
                count += 1
                writer.write(_event({"choices": [{"index": 0, "text": "", "token": token}]}))
            finished = update.finished
        usage = {"prompt_tokens": len(request.ids), "completion_tokens": count}
        writer.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _plain(status: int, fields: dict[str, Any]) -> bytes:
    content = json.dumps(fields).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + content


async def serve(engine: Engine, port: int) -> None:
    service = Service(engine)
    server = await asyncio.start_server(service.connect, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def parser() -> argparse.ArgumentParser:
    """The arguments of each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = parser.add_subparsers(dest="engine", required=True)
    parsers = {name: engines.add_parser(name) for name in ENGINES}
    for subparser in parsers.values():
        subparser.add_argument("--model", required=True)
        subparser.add_argument("--port", type=int, required=True)
        subparser.add_argument("--threads", type=int, required=True)
    parsers["openvino"].add_argument("--pool-tokens", type=int, required=True)
    parsers["transformers"].add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    return parser


def main() -> None:
    options = parser().parse_args()
    engine = ENGINES[options.engine](options)
    asyncio.run(serve(engine, options.port))


if __name__ == "__main__":
    main()

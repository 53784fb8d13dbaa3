"""`LLM`: use a model from Python, without HTTP.

    from srv import LLM

    with LLM("model.gguf", max_running_requests=8) as llm:
        for output in llm.generate(["The capital of France is"], max_tokens=8, temperature=0):
            print(output.text)

The engine runs in the process that `srv launch` starts as well; prompts are validated like request bodies, and outputs
equal those of `/v1/completions`, `/v1/chat/completions` and `/v1/embeddings`. An event loop in a thread of its own
talks to the engine, so that the methods also work where a loop is running already (notebooks).

Must not import anything heavy at module level beyond what the API process needs: `srv` imports it lazily.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
import uuid
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from srv.args.config import ARGUMENTS, find_argument_or_deprecated
from srv.args.extra import start_hooks
from srv.args.sources import gather_keywords
from srv.commands import Command, StartProfile, StopProfile
from srv.engine.replicas import make_engine
from srv.errors import Refusal, Rejection, RequestError
from srv.io.phases import Phases
from srv.offline_inputs import Body, as_batch, prompt_batch, request_bodies
from srv.planning.resolution import LaunchContext, resolve_launch
from srv.server.client import EngineClient
from srv.server.generation import CompletedSequence
from srv.server.protocols.openai.chat import Chat
from srv.server.protocols.openai.common import OpenAIEndpoint
from srv.server.protocols.openai.completions import Completions
from srv.server.protocols.pooled.embeddings import Embeddings
from srv.server.request.grammar_rules import not_enforced
from srv.server.service import Service
from srv.server.start import server_settings, start_engine
from srv.types import FinishReason, TokenLogprob

logger = logging.getLogger(__name__)

T = TypeVar("T")
Prompts = str | Sequence[int] | Sequence[str | Sequence[int]]
Messages = Sequence[Mapping[str, object]]

# Arguments that only the HTTP server reads: without one they would be accepted and ignored.
_HTTP_ARGUMENTS = frozenset(
    {
        "host",
        "port",
        "api_key",
        "max_request_bytes",
        "graceful_shutdown_seconds",
        "served_model_name",
        "enable_return_hidden_states",
        "api_keys_file",
        "ssl_certfile",
        "uds",
        "ui",
        "root_path",
        "access_log",
        "enable_cache_report",
        "skip_server_warmup",
        "warmups",
        "stream_interval",
        "stream_output",
        "expert_distribution_recorder_mode",
        "expert_distribution_recorder_buffer_size",
        "enable_expert_distribution_metrics",
    }
)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output sequence.

    `matched_stop`: the stop string or stop token id that ended it, or None. `logprobs`: one entry per token; empty if
    they were not requested. `structured_output_valid`: whether it follows its grammar; None without one.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: list[TokenLogprob]
    structured_output_valid: bool | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The `n` outputs of one prompt.

    `cached_tokens`: how many prompt tokens the prefix cache already had. `prompt_logprobs`: None if they were not
    requested.
    """

    prompt_tokens: list[int]
    cached_tokens: int
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] | None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt. `cached_tokens`: how many prompt tokens the prefix cache already had."""

    prompt_tokens: list[int]
    cached_tokens: int
    embedding: list[float]


class LLM:
    """One engine process and its tokenizer.

    `model`: a GGUF file, a Hugging Face folder or a hub id; None takes the demo model. `arguments` are server arguments
    by name, as in a YAML file (`srv args list`); SRV_ environment variables apply as well. Arguments of the HTTP server
    are refused. Only warnings are logged unless `log_level` says otherwise; a terminal or notebook shows a bar.

    Raises Refusal for arguments that cannot be satisfied, ModelError for a tokenizer that cannot be read, and
    StartError if the engine fails to start.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **arguments: object) -> None:
        if refused := [*_http_arguments(arguments), *_second_model(model, arguments)]:
            raise Refusal(refused)
        keywords = {**_quiet(os.environ), **({"model_path": model} if model is not None else {}), **arguments}
        self._context = resolve_launch(gather_keywords(keywords, os.environ, "LLM"))
        for note in self._context.notes:
            logger.warning("%s", note)
        self._engine = make_engine(self._context.resolved.config)
        self._started = self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="srv-llm", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            with _progress_bar(None) as bar:
                bar.add_task(f"starting {self._context.model.name}", total=None)
                self._run(self._start(self._context))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompts,
        *,
        progress: bool | None = None,
        overrides: Sequence[Mapping[str, object]] | None = None,
        **fields: object,
    ) -> list[RequestOutput]:
        """Continue each prompt, a text or a list of token ids; a single one is a batch of one.

        Outputs are in the order of the prompts. `fields` are the sampling fields of `/v1/completions` (max_tokens,
        temperature, top_p, n, stop, seed, logprobs ...); `overrides` has one mapping per prompt, of fields that differ
        for it. `progress`: a bar on standard error; None shows one in a terminal or notebook. Raises RequestError for
        the first prompt or field that is refused, and EngineDead.
        """
        bodies = request_bodies("prompt", prompt_batch(prompts, "prompt"), fields, overrides)
        complete = partial(self._complete, Completions(self._service))
        return self._run(self._run_batch(complete, bodies, progress))

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        *,
        progress: bool | None = None,
        overrides: Sequence[Mapping[str, object]] | None = None,
        **fields: object,
    ) -> list[RequestOutput]:
        """Answer each conversation, a list of messages {"role": ..., "content": ...}; a single one is a batch of one.

        `fields` are those of `/v1/chat/completions`; otherwise as `generate`.
        """
        batch = as_batch(conversations, "conversations", "a list of messages")
        if batch and isinstance(batch[0], Mapping):
            batch = [batch]
        bodies = request_bodies("messages", batch, fields, overrides)
        complete = partial(self._complete, Chat(self._service))
        return self._run(self._run_batch(complete, bodies, progress))

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        progress: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """The embedding of each prompt, in their order; prompts and `progress` as for `generate`.

        Needs `LLM(..., is_embedding=True)`. `dimensions` keeps that many leading elements, for models trained for it;
        `normalize` scales to length 1; None as the model's files say. Raises RequestError and EngineDead.
        """
        if not self._context.resolved.config.model.is_embedding:
            message = "this LLM does not serve embeddings; create it with is_embedding=True"
            raise RequestError(message, code="embeddings_disabled")
        fields = {"dimensions": dimensions, "normalize": normalize}
        bodies = request_bodies("input", prompt_batch(prompts, "input"), fields, None)
        embed = partial(self._embed, Embeddings(self._service))
        return self._run(self._run_batch(embed, bodies, progress))

    def start_profile(self, folder: str | os.PathLike[str]) -> None:
        """Record what the engine computes, on all ranks, until `stop_profile` writes the traces into `folder`.

        It slows the engine down, and recording for long takes much memory. Raises RequestError and EngineDead.
        """
        path = Path(folder).resolve()
        path.mkdir(parents=True, exist_ok=True)
        self._command(StartProfile(str(path)))

    def stop_profile(self) -> list[Path]:
        """Stop recording. Returns one trace per rank, which https://ui.perfetto.dev opens."""
        return self._command(StopProfile())

    def close(self) -> None:
        """Abort running requests and end the engine process. Idempotent; also on exit from a `with` block."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, command: Command) -> list[Path]:
        """The files that the ranks have written. Raises RequestError for the first rank that failed."""
        answers = self._run(self._client.control(command))
        for rank, answer in enumerate(answers):
            if answer.error is not None:
                raise RequestError(f"rank {rank}: {answer.error}", code="command_failed")
        return [Path(file) for answer in answers for file in answer.files]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop's thread and wait for the result. An interrupt of the caller cancels the work."""
        if self._closed:
            work.close()
            raise RuntimeError("this LLM is closed; create another one")
        future: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(partial(_copy_outcome, future))

        def cancel() -> None:
            for task in tasks:
                task.cancel()
            if not tasks:
                work.close()

        try:  # an interrupt may come while the work is handed over, so that it may have begun or not
            self._loop.call_soon_threadsafe(begin)
            return future.result()
        except BaseException:
            self._loop.call_soon_threadsafe(cancel)
            raise

    async def _start(self, context: LaunchContext) -> None:
        self._hooks = start_hooks("api", context.resolved.config.extras)
        phases = Phases()
        text = start_engine(self._engine, context, phases)
        ready = await self._engine.ready(context.resolved.config.server.engine_start_timeout_seconds)
        self._client = EngineClient(self._engine)
        settings = server_settings(context, ready, text, phases)
        self._service = Service(settings, self._client, text, self._hooks)
        self._receiving = asyncio.create_task(self._client.run())
        self._started = True

    async def _stop(self) -> None:
        """Runs after whatever the loop is doing: an interrupted start must not use the engine once it is closed."""
        if self._started:
            await self._service.lifecycle.drain(0.0)
            self._service.preprocessor.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._engine.close(drained=self._started)

    async def _run_batch(
        self, serve: Callable[[Body], Awaitable[T]], bodies: Sequence[Body], progress: bool | None
    ) -> list[T]:
        """Serve one request per body. The first failure cancels the others and is raised."""
        limit = asyncio.Semaphore(self._max_in_flight(bodies))
        with _progress_bar(progress) as bar:
            shown = bar.add_task("requests", total=len(bodies))
            tasks = [
                asyncio.create_task(_run_one(serve, body, limit, f"input {index}: " if len(bodies) > 1 else ""))
                for index, body in enumerate(bodies)
            ]
            for task in tasks:
                task.add_done_callback(lambda _: bar.advance(shown))
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _max_in_flight(self, bodies: Sequence[Mapping[str, object]]) -> int:
        """Requests at the engine at once: enough to keep it busy, but no more sequences than its queue may hold."""
        schedule = self._context.resolved.config.schedule
        sequences = min(2 * schedule.max_running_requests, schedule.max_queued_requests)
        most = max((n for body in bodies if isinstance(n := body.get("n"), int)), default=1)
        return max(1, sequences // max(1, most))

    async def _complete(self, endpoint: OpenAIEndpoint, body: Body) -> RequestOutput:
        prepared = await endpoint.ask(body)
        for name in not_enforced(prompt.grammar for prompt in prepared.prompts).values():
            warnings.warn(f"no grammar enforces {name} of the schema; check these parts of the output", stacklevel=2)
        ticket, group = self._service.start(prepared.prompts, [uuid.uuid4().hex], time.perf_counter())
        try:
            results = await group.gather()
        finally:
            ticket.close()
        first = results[0]
        return RequestOutput(
            prompt_tokens=first.sequence.prompt.tokens,
            cached_tokens=first.sequence.cached_tokens,
            outputs=[_output(result) for result in results],
            prompt_logprobs=first.prompt_logprobs,
        )

    async def _embed(self, endpoint: Embeddings, body: Body) -> EmbeddingOutput:
        parsed = await endpoint.parse(body)
        (embedding,) = await self._service.embed(parsed.prompts, parsed.params, uuid.uuid4().hex, time.perf_counter())
        return EmbeddingOutput(parsed.prompts[0], embedding.cached_tokens, embedding.elements())


async def _run_one(serve: Callable[[Body], Awaitable[T]], body: Body, limit: asyncio.Semaphore, which: str) -> T:
    """`which` begins the message of an error."""
    try:
        async with limit:
            return await serve(body)
    except RequestError as error:
        raise RequestError(which + error.message, code=error.code, param=error.param, status=error.status) from error


def _copy_outcome(future: Future[T], task: asyncio.Task[T]) -> None:
    """Give the outcome of a task that has ended to whoever waits for it in another thread."""
    if task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def _progress_bar(show: bool | None) -> Progress:
    """A bar on standard error; None shows it if that is a terminal or a notebook."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_visible = console.is_terminal or console.is_jupyter
    return Progress(*columns, console=console, disable=not (is_visible if show is None else show))


def _quiet(environment: Mapping[str, str]) -> dict[str, object]:
    """The log level of an engine that is used from Python, unless the environment sets one."""
    return {} if ARGUMENTS["log_level"].variable in environment else {"log_level": "warning"}


def _output(result: CompletedSequence) -> CompletionOutput:
    sequence = result.sequence
    return CompletionOutput(
        result.text,
        result.tokens,
        result.finish,
        sequence.matched,
        result.logprobs,
        sequence.structured_output_valid,
    )


def _http_arguments(arguments: Mapping[str, object]) -> list[Rejection]:
    """Rejections of arguments, by any of their names, that only the HTTP server reads."""
    refused: list[Rejection] = []
    for name, value in arguments.items():
        argument = find_argument_or_deprecated(name)
        if argument is not None and argument.name in _HTTP_ARGUMENTS and value is not None:
            reason = "only the HTTP server reads it, and LLM starts none"
            shown, remedy = argument.show(value), "Leave it out, or use `srv launch`."
            refused.append(Rejection("not_applicable", argument.name, shown, f"LLM({name}=...)", reason, remedy))
    return refused


def _second_model(model: object, arguments: Mapping[str, object]) -> list[Rejection]:
    """The rejection of a model that is also given by keyword."""
    for name, value in arguments.items():
        argument = find_argument_or_deprecated(name)
        if model is not None and value is not None and argument is not None and argument.name == "model_path":
            reason = f"the first argument names a model as well, {os.fspath(model)}"  # type: ignore[call-overload]
            return [Rejection("contradiction", name, str(value), f"LLM({name}=...)", reason, "Give one of the two.")]
    return []

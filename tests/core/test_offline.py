"""`srv.LLM` with a real engine process and a very small random model: one engine for almost all tests."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from letters_model import ALPHABET, write_model

import srv
from srv import LLM
from srv.engine.supervisor import EngineProcess
from srv.errors import ModelError, Refusal, RequestError
from srv.types import FinishReason

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# The engine refuses a request that finds five waiting.
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "max_running_requests": 4,
    "max_queued_requests": 5,
    "max_total_tokens": 4096,
    "disable_graphs": True,
}


def ids(text: str) -> list[int]:
    return [ALPHABET.index(letter) for letter in text if letter != " "]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SRV_")]:
            patch.delenv(name)
        folder = write_model(tmp_path_factory.mktemp("model") / "letters")
        config = json.loads((folder / "config.json").read_text())  # tied: an embedding model that generates text, too
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]  # and no norm
        (folder / "modules.json").write_text(json.dumps(modules))
        yield folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, is_embedding=True, **ARGUMENTS) as llm:
        yield llm


def alive(llm: LLM) -> bool:
    return llm.generate("abc", max_tokens=2, **GREEDY)[0].outputs[0].finish_reason is FinishReason.LENGTH


def fields_of(llm: LLM, **fields: Any) -> Any:
    """The first output of one short greedy request."""
    return llm.generate("abc", **{"max_tokens": 6, **GREEDY, **fields})[0].outputs[0]


# Inputs and the order of outputs


def test_prompts_are_texts_or_token_ids_alone_or_in_a_list(llm: LLM) -> None:
    text, tokens = "a b c d", [3, 1, 4]
    batch = llm.generate([text, tokens, tuple(tokens)], max_tokens=5, **GREEDY)
    assert [output.prompt_tokens for output in batch] == [ids(text), tokens, tokens]
    assert [output.outputs[0].tokens for output in batch[1:]] == [batch[1].outputs[0].tokens] * 2
    for prompt, output in ((text, batch[0]), (tokens, batch[1])):
        (single,) = llm.generate(prompt, max_tokens=5, **GREEDY)
        assert (single.prompt_tokens, single.outputs) == (output.prompt_tokens, output.outputs)
    for output in batch:
        (only,) = output.outputs
        assert (only.finish_reason, len(only.tokens), ids(only.text)) == (FinishReason.LENGTH, 5, only.tokens)
        assert output.text == only.text
    assert llm.generate([]) == []


def test_outputs_are_in_the_order_of_the_prompts_though_the_last_end_first(llm: LLM) -> None:
    lengths = [20 - number for number in range(20)]
    prompts = [[number] * (1 + number % 3) for number in range(20)]
    outputs = llm.generate(prompts, overrides=[{"max_tokens": length} for length in lengths], **GREEDY)
    assert [output.prompt_tokens for output in outputs] == prompts
    assert [len(output.outputs[0].tokens) for output in outputs] == lengths


def test_a_batch_never_fills_the_engines_queue(llm: LLM) -> None:
    for count, n in ((60, 1), (20, 4)):
        assert llm._max_in_flight([{"n": n}] * count) * n <= ARGUMENTS["max_queued_requests"]
        outputs = llm.generate(["abc"] * count, n=n, max_tokens=3, ignore_eos=True)
        assert [len(output.outputs) for output in outputs] == [n] * count


def test_chat_takes_one_conversation_or_a_list_and_applies_the_template(llm: LLM) -> None:
    first = [{"role": "system", "content": "a b "}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
    second = ({"role": "user", "content": "d e"},)
    single = llm.chat(first, max_tokens=4, **GREEDY)
    batch = llm.chat([first, second], max_tokens=4, **GREEDY)
    assert [output.prompt_tokens for output in batch] == [ids("abc"), ids("de")]
    assert [(output.prompt_tokens, output.outputs) for output in single] == [(ids("abc"), batch[0].outputs)]
    assert [len(output.outputs[0].tokens) for output in batch] == [4, 4]
    assert llm.chat([]) == []


# Sampling


def test_fields_apply_to_the_call_and_overrides_to_single_prompts(llm: LLM) -> None:
    plain = fields_of(llm)
    assert plain == fields_of(llm)
    assert fields_of(llm, max_tokens=2).tokens == plain.tokens[:2]
    assert fields_of(llm, logit_bias={7: 100}).tokens == [7] * 6
    stop = ALPHABET[plain.tokens[2]]
    stopped = fields_of(llm, stop=(stop,))
    assert (stopped.finish_reason, stopped.matched_stop, stop in stopped.text) == (FinishReason.STOP, stop, False)
    scored = fields_of(llm, logprobs=2)
    assert ([len(entry.top) for entry in scored.logprobs], plain.logprobs) == ([2] * 6, [])
    three, other = llm.generate(["abc", "abd"], n=3, seed=5, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    assert len({tuple(output.tokens) for output in three.outputs}) > 1
    assert three.prompt_logprobs is not None
    assert llm.generate("abc", n=3, seed=5, max_tokens=8, ignore_eos=True)[0].outputs == three.outputs
    assert other.prompt_logprobs is not None

    overrides: list[dict[str, object]] = [{}, {"max_tokens": 3}, {"logit_bias": {7: 100}}, {"n": 2}]
    outputs = llm.generate(["abc"] * 4, max_tokens=6, overrides=overrides, **GREEDY)
    expected = [[plain.tokens], [plain.tokens[:3]], [[7] * 6], [plain.tokens] * 2]
    assert [[output.tokens for output in prompt.outputs] for prompt in outputs] == expected


# Embeddings


def test_embeddings_of_texts_and_token_ids_of_any_number(llm: LLM) -> None:
    texts, tokens = "a b c d", [3, 1, 4]
    batch = llm.embed([texts, tokens, tuple(tokens)], normalize=True)
    assert [output.prompt_tokens for output in batch] == [ids(texts), tokens, tokens]
    assert batch[1].embedding == batch[2].embedding != batch[0].embedding
    assert [math.hypot(*output.embedding) for output in batch] == [pytest.approx(1)] * 3
    assert llm.embed(texts, normalize=True)[0].embedding == pytest.approx(batch[0].embedding, abs=1e-5)
    assert [len(output.embedding) for output in llm.embed(["a"] * 30, dimensions=4, progress=False)] == [4] * 30
    (raw,) = llm.embed(tokens, normalize=False)
    assert llm.embed(tokens)[0].embedding == raw.embedding  # as modules.json says
    length = math.hypot(*raw.embedding)
    assert abs(length - 1) > 0.01
    assert [element / length for element in raw.embedding] == pytest.approx(batch[1].embedding, abs=1e-5)
    assert llm.embed([]) == []
    assert alive(llm)


# The progress bar


def test_the_progress_bar_counts_requests_on_standard_error_if_it_is_wanted(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    for progress in (None, False):  # standard error is no terminal here
        llm.generate(["a", "b"], max_tokens=2, progress=progress)
    assert capsys.readouterr() == ("", "")
    llm.chat([[{"role": "user", "content": "a"}]] * 3, max_tokens=2, progress=True)
    shown = capsys.readouterr()
    assert (shown.out, "requests" in shown.err, "3/3" in shown.err) == ("", True, True)


# Refusals

USER = {"role": "user", "content": "abc"}
REFUSED: dict[str, tuple[Callable[[LLM], object], tuple[str, ...]]] = {
    "no prompt": (lambda llm: llm.generate(None), ("prompts must be a string or a list of token ids", "NoneType")),  # type: ignore[arg-type]
    "a mapping": (lambda llm: llm.generate({"prompt": "a"}), ("prompts must be", "dict")),  # type: ignore[arg-type]
    "bytes": (lambda llm: llm.generate(b"abc"), ("prompts must be", "bytes")),
    "lists in lists": (lambda llm: llm.generate([["a", "b"]]), ("prompts[0] must be", "other elements")),  # type: ignore[list-item]
    "no token ids": (lambda llm: llm.generate(["a", []]), ("prompts[1] must be", "an empty list")),
    "an empty text": (lambda llm: llm.generate(["a", ""]), ("input 1: prompt is empty", "send at least one token")),
    "a token outside": (lambda llm: llm.generate([[3], [26]]), ("input 1:", "token id 26", "0 to 25")),
    "a long prompt": (lambda llm: llm.generate([3] * 5000), ("prompt has 5000 tokens", "4096", "shorten it")),
    "half a character": (lambda llm: llm.generate("a\ud800"), ("surrogate",)),
    "an unknown field": (lambda llm: llm.generate("a", max_tokenz=3), ("unknown field max_tokenz", "max_tokens?")),
    "a bad value": (lambda llm: llm.generate("a", temperature=-1), ("temperature = -1 is refused",)),
    "a Python type": (lambda llm: llm.generate("a", stop={"b"}), ("stop = {'b'} is refused", "type set")),
    "an HTTP field": (lambda llm: llm.generate("a", stream=True), ("stream is refused", "leave it out")),
    "a second prompt": (lambda llm: llm.generate("a", prompt="b"), ("prompt is refused", "first argument")),
    "too few overrides": (lambda llm: llm.generate(["a", "b"], overrides=[{}]), ("overrides has 1", "2 inputs")),
    "a bad override": (lambda llm: llm.generate(["a", "b"], overrides=[{}, {"n": 0}]), ("input 1: n = 0",)),
    "no conversation": (lambda llm: llm.chat("abc"), ("conversations must be a list of messages", "type str")),  # type: ignore[arg-type]
    "a single message": (lambda llm: llm.chat(USER), ("conversations must be", "type dict")),  # type: ignore[arg-type]
    "no message": (lambda llm: llm.chat([[USER], []]), ("input 1: messages = [] is refused",)),
    "a text as message": (lambda llm: llm.chat([USER, "abc"]), ('messages[1] = "abc" is refused',)),  # type: ignore[list-item]
    "no text to embed": (lambda llm: llm.embed(None), ("prompts must be a string or a list of token ids", "NoneType")),  # type: ignore[arg-type]
    "an empty text to embed": (lambda llm: llm.embed(["a", ""]), ("input 1: input is empty",)),
    "dimensions": (lambda llm: llm.embed("a", dimensions=17), ("dimensions = 17 is refused", "16 elements")),
    "no boolean": (lambda llm: llm.embed("a", normalize=1), ("normalize = 1 is refused",)),  # type: ignore[arg-type]
    "tools": (lambda llm: llm.chat([USER], tools=[{}]), ("tools[0].type is required",)),
}


@pytest.mark.slow
def test_only_warnings_are_logged_unless_a_level_is_set(llm: LLM, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm._context.resolved.config.server.log_level == "warning"
    code = f"from srv import LLM\nLLM({str(model)!r}, **{ARGUMENTS!r}).close()"
    logged = {}
    for level in ("info", None):
        monkeypatch.delenv("SRV_LOG_LEVEL", raising=False) if level is None else monkeypatch.setenv(
            "SRV_LOG_LEVEL", level
        )
        command = [sys.executable, "-P", "-c", code]
        process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        logged[level] = [line for line in process.stderr.splitlines() if " INFO " in line]
    assert logged["info"]
    assert logged[None] == []


def test_refused_inputs_name_what_is_wrong_and_the_engine_lives_on(llm: LLM) -> None:
    faults = []
    for name, (call, parts) in REFUSED.items():
        try:
            faults.append((name, call(llm)))
        except RequestError as error:
            if not all(part in str(error) for part in parts):
                faults.append((name, str(error)))
    assert not faults
    assert alive(llm)


def test_refused_arguments_start_no_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProcess, "start", lambda *args: pytest.fail("an engine was started"))
    faults = []
    for arguments, parts in (
        ({"port": 3, "api_key": "secret"}, ("port = 3 (set by LLM(port=...))", "Leave it out", "api_key = (hidden)")),
        ({"enable_return_hidden_states": True}, ("enable_return_hidden_states", "only the HTTP server reads it")),
        (
            {"expert_distribution_recorder_mode": "stat", "expert_distribution_recorder_buffer_size": 3},
            ("expert_distribution_recorder_mode = stat", "expert_distribution_recorder_buffer_size = 3 (set by LLM("),
        ),
        ({"enable_expert_distribution_metrics": True}, ("metrics = true", "only the HTTP server reads it")),
        ({"model_path": "other"}, ("model_path = other", str(model), "Give one of the two")),
        ({"max_runing_requests": 3}, ("max_runing_requests", "Did you mean max_running_requests?")),
        ({"page_size": "x"}, ("page_size = x (set by LLM(page_size=...))",)),
    ):
        with pytest.raises(Refusal) as caught:
            LLM(model, **{**ARGUMENTS, **arguments})
        if not all(part in str(caught.value) for part in parts) or "secret" in str(caught.value):
            faults.append((arguments, str(caught.value)))
    assert not faults


def test_stop_strings_end_outputs_within_drafts_at_the_same_token(llm: LLM, model: Path) -> None:
    """Strings of one to five tokens in texts that go on with the letters that they repeat, so that drafts are right."""
    text = "abc" + llm.generate("abc", max_tokens=60, **GREEDY)[0].text
    half = len(text) // 2
    cases = [(text[:end], text[end + 2 : end + 2 + size]) for end in range(half, half + 50) for size in (2, 4, 6, 10)]
    prompts = [prompt for prompt, _ in cases]
    fields = {**GREEDY, "max_tokens": 20, "overrides": [{"stop": stop} for _, stop in cases]}
    expected = llm.generate(prompts, **fields)
    with LLM(model, speculative_algorithm="NGRAM", **ARGUMENTS) as drafted:
        outputs = drafted.generate(prompts, **fields)
        stats = drafted._run(drafted._client.stats())
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert {output.outputs[0].finish_reason for output in outputs} == {FinishReason.STOP}
    assert stats.drafts_accepted > 0


def test_a_profile_contains_the_steps_between_start_and_stop(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="rank 0: no profile is being recorded"):
        llm.stop_profile()
    llm.start_profile(tmp_path / "traces")
    with pytest.raises(RequestError, match="already"):
        llm.start_profile(tmp_path)
    assert alive(llm)
    (trace,) = llm.stop_profile()
    assert trace.parent == tmp_path / "traces"
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "aten::embedding" for event in events)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        llm.start_profile(tmp_path / "file")
    assert alive(llm)


# Start, interruption and end


def test_an_interrupt_aborts_the_requests_and_the_engine_lives_on(llm: LLM) -> None:
    main, lifecycle = threading.get_ident(), llm._service.lifecycle

    def interrupt_once_running() -> None:
        if waited_for(lambda: lifecycle.active > 0):
            signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt_once_running)
    # A shell starts background jobs with SIGINT ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc"] * 3, max_tokens=4000, ignore_eos=True)
    finally:
        interrupter.join()
        signal.signal(signal.SIGINT, inherited)
    assert waited_for(lambda: lifecycle.active == 0)
    assert alive(llm)


def test_an_interrupt_while_work_is_handed_over_aborts_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may be at work before the caller waits for it."""
    lifecycle, hand_over = llm._service.lifecycle, llm._loop.call_soon_threadsafe

    def interrupted(callback: Callable[..., object], *args: object) -> None:
        monkeypatch.undo()
        hand_over(callback, *args)
        assert waited_for(lambda: lifecycle.active > 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 3, max_tokens=4000, ignore_eos=True)
    assert waited_for(lambda: lifecycle.active == 0)
    assert alive(llm)


def test_a_start_that_fails_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    threads = threading.active_count()
    started: list[EngineProcess] = []
    with pytest.MonkeyPatch.context() as patch:
        start = EngineProcess.start
        patch.setattr(EngineProcess, "start", lambda self, *args: (started.append(self), start(self, *args)))
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            LLM(model, tokenizer_path=str(tmp_path), **ARGUMENTS)
    (engine,) = started
    assert ended(engine)
    assert threading.active_count() == threads


def waited_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until the condition holds. Returns False if it does not within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def ended(engine: EngineProcess) -> bool:
    assert engine._process is not None
    return engine._process.poll() is not None and not engine._directory.path.exists()


def test_close_aborts_what_runs_and_ends_the_process(model: Path) -> None:
    cut: list[Any] = []
    with LLM(model, **ARGUMENTS) as llm:
        with pytest.raises(RequestError, match="create it with is_embedding=True"):
            llm.embed("abc")
        running = threading.Thread(
            target=lambda: cut.extend(llm.generate("abc", max_tokens=4000, ignore_eos=True)), daemon=True
        )
        running.start()
        while not llm._service.lifecycle.active:
            time.sleep(0.01)
    running.join(10)
    assert [output.outputs[0].finish_reason for output in cut] == [FinishReason.ABORT]
    assert ended(llm._engine)
    llm.close()
    for call in (lambda: llm.generate("abc"), lambda: llm.chat([USER])):
        with pytest.raises(RuntimeError, match="closed; create another one"):
            call()


def test_importing_srv_is_cheap() -> None:
    code = "import srv, sys; print(srv.__version__, *{'torch', 'srv.offline', 'pydantic', 'zmq'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout.split() == [srv.__version__]
    with pytest.raises(AttributeError, match="'srv' has no attribute 'LLMM'"):
        srv.LLMM  # noqa: B018 - the look-up raises

"""The native endpoints of the started server: generate, abort, cache, information, text tools, metrics."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
from e2e_support import BUSY, Server, greedy, read_events, wait_until

import srv
from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SERVER_ARGUMENTS = (
    "--max-running-requests", "24", "--chunked-prefill-size", "256", "--page-size", "8", "--max-total-tokens", "16384",
    "--served-model-name", "demo", "--schedule-policy", "lpm",
)  # fmt: skip
STORY = "Once upon a time"
TEXTS = [
    "Hello, world!",
    "digits 1234567890 and 007",
    "  leading,\ttabs\n\nnew lines  ",
    "日本語, עברית, naïve café 🙂👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>",
]


def tokenize(server: Server, text: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", prompt=text).json()["tokens"]
    return tokens


# ---- /generate


@covers("endpoint:POST /generate")
def test_text_and_its_ids_give_the_same_output(server: Server) -> None:
    by_text = server.generate(**greedy(STORY, 12))
    server.flush()
    body = greedy(STORY, 12)
    by_ids = server.generate(input_ids=tokenize(server, body.pop("text")), **body)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["text"] == by_ids["text"]
    assert len(by_text["output_ids"]) == 12
    meta = by_text["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(tokenize(server, STORY)), 12)


def test_output_ids_are_the_text(server: Server) -> None:
    answer = server.generate(**greedy(STORY, 12))
    assert server.post("/detokenize", tokens=answer["output_ids"]).json() == {"text": answer["text"]}


def test_stream_grows_to_the_whole_answer(server: Server) -> None:
    server.flush()
    whole = server.generate(**greedy(STORY, 12))
    server.flush()
    with server.client() as client:
        response = client.post("/generate", json={**greedy(STORY, 12), "stream": True})
    *shown, end = read_events(response.text.split("\n"))
    assert end == "[DONE]"
    assert shown[-1]["text"] == whole["text"]
    assert shown[-1]["output_ids"] == whole["output_ids"]
    assert shown[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    counts = [event["meta_info"]["completion_tokens"] for event in shown]
    assert counts == sorted(counts)
    assert len(shown) > 4
    assert all(event["meta_info"]["finish_reason"] is None for event in shown[:-1])


def test_batch_keeps_the_order_and_each_its_parameters(server: Server) -> None:
    answers = server.generate(
        text=[STORY, "The capital of France is"],
        sampling_params=[
            {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
            {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        ],
        rid=["first", "second"],
    )
    assert [answer["meta_info"]["id"] for answer in answers] == ["first", "second"]
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [3, 5]
    assert "Paris" in answers[1]["text"]


def test_batch_of_ids(server: Server) -> None:
    prompts = [tokenize(server, STORY), tokenize(server, "The capital of France is")]
    answers = server.generate(input_ids=prompts, sampling_params={"max_new_tokens": 4, "temperature": 0})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [len(prompt) for prompt in prompts]
    assert "Paris" in answers[1]["text"]


def test_logprobs_of_prompt_and_output(server: Server) -> None:
    ids = tokenize(server, "The capital of France is")
    meta = server.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 3, "temperature": 0},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )["meta_info"]
    prompt = meta["input_token_logprobs"]
    assert [token for _, token, _ in prompt] == ids
    assert prompt[0][0] is None  # nothing comes before the first token
    assert all(logprob <= 0 for logprob, _, _ in prompt[1:])
    assert len(meta["input_top_logprobs"]) == len(ids)
    output = meta["output_token_logprobs"]
    assert len(output) == 3
    assert output[0][2] == " Paris"
    for chosen, top in zip(output, meta["output_top_logprobs"], strict=True):
        assert len(top) == 2
        assert chosen[:2] == top[0][:2]
        assert sum(math.exp(logprob) for logprob, _, _ in top) <= 1.0001


def test_prompt_logprobs_are_the_same_after_the_prompt_is_cached(server: Server) -> None:
    """There are no logits for a cached prefix, so the hit must end before the first scored token."""
    server.flush()
    ids = tokenize(server, "A long enough prompt to fill a few pages of the pool, so that some of it is cached.")
    asked: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
    }
    first = server.generate(**asked, logprob_start_len=0)["meta_info"]
    again = server.generate(**asked, logprob_start_len=0)["meta_info"]
    tail = server.generate(**asked, logprob_start_len=len(ids) - 2)["meta_info"]
    plain = server.generate(**asked)["meta_info"]
    assert again["input_token_logprobs"] == first["input_token_logprobs"]
    assert again["cached_tokens"] == 0
    assert 0 < tail["cached_tokens"] < len(ids) - 2
    expected = first["input_token_logprobs"][-1]
    assert tail["input_token_logprobs"][-1] == [pytest.approx(expected[0], abs=0.2), *expected[1:]]
    assert plain["cached_tokens"] > 0
    assert "input_token_logprobs" not in plain


def test_the_greedy_output_is_the_likeliest_by_its_own_prompt_logprobs(server: Server) -> None:
    """An output that is scored as a prompt has the logprobs of its generation (prefill and decode agree)."""
    ids = tokenize(server, STORY)
    generated = server.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 6, "temperature": 0}, return_logprob=True
    )
    scored = server.generate(
        input_ids=ids + generated["output_ids"],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )["meta_info"]
    generated_logprobs = [logprob for logprob, _, _ in generated["meta_info"]["output_token_logprobs"]]
    prompt_logprobs = [logprob for logprob, _, _ in scored["input_token_logprobs"][-6:]]
    assert prompt_logprobs == pytest.approx(generated_logprobs, abs=0.25)  # bfloat16


# ---- /abort_request


@covers("endpoint:POST /abort_request")
def test_abort_by_id_ends_the_request_and_tells_its_client(server: Server) -> None:
    answers: list[Any] = []
    body = greedy(STORY, 4000, rid="endless")
    waiting = threading.Thread(target=lambda: answers.append(server.generate(**body)), daemon=True)
    waiting.start()
    wait_until(lambda: server.metrics()["srv_requests_running"] == 1, 30, "the request runs")
    assert server.post("/abort_request", rid="endless").json() == {"aborted": 1}
    waiting.join(30)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answers[0]["output_ids"]) < 4000
    server.wait_pages_back()


def test_abort_all_and_abort_of_nobody(server: Server) -> None:
    answers: list[Any] = []
    body: dict[str, Any] = {
        "text": [STORY, "Another one"],
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True},
    }
    waiting = threading.Thread(target=lambda: answers.extend(server.generate(**body)), daemon=True)
    waiting.start()
    wait_until(lambda: server.metrics()["srv_requests_running"] == 2, 30, "both requests run")
    assert server.post("/abort_request", abort_all=True).json()["aborted"] == 2
    waiting.join(30)
    assert [answer["meta_info"]["finish_reason"]["type"] for answer in answers] == ["abort", "abort"]
    nobody = server.post("/abort_request", rid="nobody")
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "request_not_found")


# ---- /flush_cache


@covers("endpoint:POST /flush_cache")
def test_flush_forgets_the_prefix_and_is_refused_while_a_request_runs(server: Server) -> None:
    prompt = "The same words again and again. " * 6
    server.generate(**greedy(prompt, 1))
    assert server.generate(**greedy(prompt, 1))["meta_info"]["cached_tokens"] > 0
    assert server.post("/flush_cache").json() == {"flushed": True}
    assert server.generate(**greedy(prompt, 1))["meta_info"]["cached_tokens"] == 0
    with server.client() as client, client.stream("POST", "/generate", json={**greedy(prompt, 2000), "stream": True}):
        wait_until(lambda: server.metrics()["srv_requests_running"] == 1, 30, "the request runs")
        refused = server.post("/flush_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cache_in_use")
    shown = server.wait_pages_back()
    assert shown["srv_kv_pages_cached"] > 0
    server.flush()
    empty = server.metrics()
    assert empty["srv_kv_pages_free"] == empty["srv_kv_pages_total"]


# ---- information


@covers("endpoint:GET /get_server_info")
def test_server_info_tells_what_was_passed_and_who_said_so(server: Server) -> None:
    info = server.get("/get_server_info").json()
    passed = {
        "max_running_requests": 24,
        "chunked_prefill_size": 256,
        "page_size": 8,
        "max_total_tokens": 16384,
        "served_model_name": "demo",
        "schedule_policy": "lpm",
        "device": "cpu",
        "port": server.port,
    }
    provenance = info["arguments"]
    assert {name: provenance[name]["value"] for name in passed} == passed
    assert {provenance[name]["layer"] for name in passed} == {"user"}
    assert {provenance[name]["owner"] for name in passed} == {"command line"}
    assert provenance["dtype"]["layer"] != "user"
    assert provenance["page_size"]["shadowed"], "the platform's own choice is reported too"
    (rank,) = info["memory"]
    lines = {line["name"]: line for line in rank["lines"]}
    for name in ("weights", "KV pool"):
        assert abs(lines[name]["excess"]) <= 0.05, lines[name]
    phases = {process["process"]: [phase["name"] for phase in process["phases"]] for process in info["startup"]}
    assert phases["api"] == ["interpreter", "resolve", "tokenizer", "imports", "engine", "http"]
    assert phases["engine"][:5] == ["interpreter", "imports", "device", "weights", "prepare"]
    assert info["platform"] == "cpu"
    assert (info["page_size"], info["pages"]) == (8, [16384 // 8])
    assert info["engine"]["pages_total"] == 16384 // 8
    assert "max_total_tokens 16384" in info["budget"]["limit"]
    kernels = info["kernels"]
    assert {kernel["key"]: kernel["running"] for kernel in kernels} == {
        kernel["key"]: kernel["implementation"] for kernel in kernels
    }
    assert {"layers", "sampling", "steps decode"} < {kernel["key"] for kernel in kernels}


@covers("endpoint:GET /get_model_info")
def test_model_info(server: Server) -> None:
    info = server.get("/get_model_info").json()
    assert info["architecture"] == "LlamaForCausalLM"
    assert (info["context_length"], info["vocab_size"]) == (8192, 49152)
    assert info["quantization"] == "gguf:Q4_1"
    assert server.model() == "demo"


@covers("endpoint:GET /health_generate")
def test_health_generate_makes_a_token(server: Server) -> None:
    before = server.metrics()["srv_generated_tokens_total"]
    assert server.get("/health_generate").json() == {"status": "ok"}
    assert server.metrics()["srv_generated_tokens_total"] == before + 1


@covers("endpoint:GET /ping", "endpoint:GET /version")
def test_ping_and_version(server: Server) -> None:
    assert server.get("/ping").status_code == 200
    assert server.get("/version").json() == {"version": srv.__version__}


# ---- text tools


@covers("endpoint:POST /tokenize", "endpoint:POST /detokenize")
@pytest.mark.parametrize("text", TEXTS)
def test_tokenize_and_detokenize_round_trip(server: Server, text: str) -> None:
    ids = tokenize(server, text)
    assert ids
    assert server.post("/detokenize", tokens=ids, skip_special_tokens=False).json() == {"text": text}


def test_tokenize_returns_count_and_texts(server: Server) -> None:
    shown = server.post("/tokenize", prompt="Hello 123", return_token_strs=True).json()
    assert shown["token_strs"] == ["Hello", " ", "1", "2", "3"]
    assert shown["count"] == len(shown["tokens"]) == 5
    batch = server.post("/tokenize", prompt=["a", "b c"]).json()
    assert batch["count"] == [1, 2]


def test_tokenized_conversation_is_what_a_chat_counts(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    count = server.post("/tokenize", messages=messages).json()["count"]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert chat["usage"]["prompt_tokens"] == count


# ---- /metrics


@covers("endpoint:GET /metrics")
def test_metrics_move_with_the_work(server: Server) -> None:
    server.flush()
    before = server.metrics()
    prompt = "A prompt of some length, so that a page or two of it can be found again. " * 2
    for _ in range(2):
        server.generate(**greedy(prompt, 5))
    after = server.wait_pages_back()
    moved = {name: after[name] - before.get(name, 0) for name in after}
    length = len(tokenize(server, prompt))
    assert moved["srv_prompt_tokens_total"] == 2 * length
    assert length - 8 <= moved["srv_cached_tokens_total"] < length
    assert moved["srv_generated_tokens_total"] == 10
    assert moved["srv_sequences_finished_total"] == 2
    assert moved['srv_sequences_total{finish_reason="length"}'] == 2
    assert moved["srv_time_to_first_token_seconds_count"] == 2
    assert moved["srv_inter_token_seconds_count"] == 8
    assert moved["srv_request_seconds_count"] == 2
    assert moved["srv_engine_steps_total"] >= 10
    assert after["srv_engine_up"] == 1
    assert after["srv_kv_pages_total"] == after["srv_kv_pages_free"] + after["srv_kv_pages_cached"]
    assert {after[name] for name in BUSY} == {0}

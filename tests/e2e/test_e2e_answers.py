"""Arguments that change what a server answers, and how texts become tokens: two values of each on real servers.

`plain` has the defaults; `other` has another value of each argument, and a model whose files have sampling parameters.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_support import Server, free_port, gone, greedy, launch, launched, read_events, wait_until

from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PROCESSORS = ROOT / "tests" / "packages" / "srv_example_processors"
WORKER = "srv.server.text.encode_child"
LONG_TEXT = "a b c d " * 2000


@pytest.fixture(scope="module")
def common(letters_model: Path, srv_device: str) -> tuple[str, ...]:
    return ("--device", srv_device, "--load-format", "dummy", "--max-total-tokens", "40000")


@pytest.fixture(scope="module")
def plain(common: tuple[str, ...], letters_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("plain") / "log"
    files = ("--file-storage-path", str(log.parent / "files"))
    with launched(log, *common, *files, "--model-path", str(letters_model)) as server:
        yield server


@pytest.fixture(scope="module")
def tuned_model(letters_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose authors sample greedily in effect."""
    folder = tmp_path_factory.mktemp("tuned") / "letters"
    shutil.copytree(letters_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 0.7, "top_p": "high"}))
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel of the example processors contains."""
    folder = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip")
    options = ("-q", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(folder / "wheel"), str(PROCESSORS)], check=True)
    (wheel,) = (folder / "wheel").iterdir()
    target = ("--target", str(folder / "site"), str(wheel))
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", *target], check=True)
    return folder / "site"


@pytest.fixture(scope="module")
def other(
    common: tuple[str, ...], tuned_model: Path, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("other")
    config = folder / "serve.yaml"
    arguments = {
        "stream_interval": 4,
        "stream_output": True,
        "enable_cache_report": False,
        "preferred_sampling_params": '{"max_new_tokens": 3}',
        "tokenizer_worker_num": 2,
        "enable_tokenizer_batch_encode": True,
        "skip_server_warmup": False,
        "warmups": ["chat", "long_prompt", "batch"],
        "enable_custom_logit_processor": True,
        "trust_request_chat_template": True,
        "file_storage_path": str(folder / "new" / "uploads"),
    }
    config.write_text(json.dumps(arguments))
    environment = {"PYTHONPATH": os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))}
    flags = (*common, "--model-path", str(tuned_model), "--config", str(config))
    with launched(folder / "log", *flags, environment=environment) as server:
        yield server


def streamed(server: Server, path: str, **body: Any) -> list[Any]:
    """The events of a stream, without the end marker."""
    with server.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        shown = read_events(list(response.iter_lines()))
    assert shown[-1] == "[DONE]"
    return shown[:-1]


def refused(server: Server, path: str, **body: Any) -> tuple[str, str | None]:
    """Code and field of the refusal."""
    response = server.post(path, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["code"], error["param"]


@covers("stream_interval=1", "stream_interval=4")
def test_stream_interval(plain: Server, other: Server) -> None:
    """The first token comes alone; then chunks have at least four tokens, and the last one has the rest."""
    body = {"prompt": [1, 2], "max_tokens": 11, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    sizes, whole = [], []
    for server in (plain, other):
        choices = [event["choices"][0] for event in streamed(server, "/v1/completions", **body)]
        sizes.append([len(choice["token_ids"]) for choice in choices])
        whole.append("".join(choice["text"] for choice in choices))
        assert choices[-1]["finish_reason"] == "length"
    assert sizes[0] == [1] * 11
    assert sizes[1] == [1, 4, 4, 2]
    assert whole[0] == whole[1]


@covers("stream_output=false", "stream_output=true")
def test_stream_output(plain: Server, other: Server) -> None:
    body = {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    texts, ids, logprobs = [], [], []
    for server in (plain, other):
        shown = streamed(server, "/generate", **body)
        texts.append([event["text"] for event in shown])
        ids.append([event["output_ids"] for event in shown])
        logprobs.append([event["meta_info"]["output_token_logprobs"] for event in shown])
        assert "input_token_logprobs" in shown[0]["meta_info"]
    assert [len(ids_of_chunk) for ids_of_chunk in ids[0]] == list(range(1, 10))
    assert [len(ids_of_chunk) for ids_of_chunk in ids[1]] == [1, 4, 4] == [len(logprob) for logprob in logprobs[1]]
    assert [token for ids_of_chunk in ids[1] for token in ids_of_chunk] == ids[0][-1]
    assert "".join(texts[1]) == texts[0][-1]


@covers("enable_cache_report=true", "enable_cache_report=false")
def test_enable_cache_report(plain: Server, other: Server) -> None:
    body = {"prompt": [3] * 40, "max_tokens": 1}
    for server, reports in ((plain, True), (other, False)):
        usages = [server.post("/v1/completions", **body).json()["usage"] for _ in range(2)]
        assert ["prompt_tokens_details" in usage for usage in usages] == [reports] * 2
        assert ("cached_tokens" in server.generate(**greedy("a", 1))["meta_info"]) is reports
    assert plain.post("/v1/completions", **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@covers("sampling_defaults=model", "sampling_defaults=openai")
def test_sampling_defaults(plain: Server, other: Server, gathering: Server) -> None:
    """A request without a top_k gets that of generation_config.json; one value there is no number and is ignored."""
    body = {"prompt": [5, 6], "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    requests = ((other, {}), (other, {"top_k": -1}), (plain, {}), (gathering, {}))
    outputs = [_outputs(server, **body, n=4, **more) for server, more in requests]
    assert [len({*map(tuple, output)}) > 1 for output in outputs] == [False, True, True, True]
    assert other.get("/get_model_info").json()["sampling_defaults"] == {"temperature": 0.7, "top_k": 1, "max_tokens": 3}
    assert "top_p = " in other.log_text()


def _outputs(server: Server, **body: Any) -> list[list[int]]:
    response = server.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


@covers("preferred_sampling_params")
def test_preferred_sampling_params(plain: Server, other: Server, common: tuple[str, ...], letters_model: Path) -> None:
    """They apply where the request has none, in every protocol."""
    chat = {"messages": [{"role": "user", "content": "a b"}], "ignore_eos": True, "max_completion_tokens": 5}
    for server, expected in ((plain, (16, 128, 5)), (other, (3, 3, 5))):
        completion = server.post("/v1/completions", prompt=[1], ignore_eos=True).json()
        native = server.generate(input_ids=[1], sampling_params={"ignore_eos": True})
        counts = (
            completion["usage"]["completion_tokens"],
            native["meta_info"]["completion_tokens"],
            server.post("/v1/chat/completions", **chat).json()["usage"]["completion_tokens"],
        )
        assert counts == expected
    flags = (*common, "--model-path", str(letters_model), "--port", str(free_port()))
    status, text, _ = launch(*flags, "--preferred-sampling-params", '{"temperatur": 1}')
    assert (status, "temperature" in text, "preferred_sampling_params" in text) == (2, True, True)


@covers("tokenizer_worker_num=1", "tokenizer_worker_num=2")
def test_tokenizer_worker_num(plain: Server, other: Server) -> None:
    """Long texts are encoded in two processes, with the same result; a lost one is replaced."""
    workers = other.children(WORKER)
    assert (len(plain.children(WORKER)), len(workers)) == (0, 2)
    body = {"prompt": LONG_TEXT}
    tokens = [server.post("/tokenize", **body).json()["tokens"] for server in (plain, other)]
    assert tokens[0] == tokens[1] == [0, 1, 2, 3] * 2000
    for worker in workers:
        os.kill(worker, 9)
    for _ in range(3):
        assert other.post("/tokenize", **body).json()["tokens"] == tokens[0]
    wait_until(lambda: len([pid for pid in other.children(WORKER) if not gone(pid)]) == 2, 20, "both are replaced")


def encoded(server: Server) -> tuple[float, float]:
    """Texts that were encoded, and calls of the tokenizer."""
    shown = server.metrics()
    return shown["srv_texts_encoded_total"], shown["srv_encode_calls_total"]


def encoded_by(server: Server, **body: Any) -> tuple[float, float]:
    before = encoded(server)
    assert server.post("/tokenize", **body).status_code == 200
    after = encoded(server)
    return after[0] - before[0], after[1] - before[1]


def completed(client: httpx.Client, batch: str) -> dict[str, Any]:
    def shown() -> dict[str, Any]:
        return dict(client.get(f"/v1/batches/{batch}").raise_for_status().json())

    wait_until(lambda: shown()["status"] == "completed", 60, "the batch has not been completed")
    return shown()


@covers(
    "file_storage_path",
    "endpoint:POST /v1/files",
    "endpoint:GET /v1/files",
    "endpoint:GET /v1/files/{file}",
    "endpoint:GET /v1/files/{file}/content",
    "endpoint:DELETE /v1/files/{file}",
    "endpoint:POST /v1/batches",
    "endpoint:GET /v1/batches",
    "endpoint:GET /v1/batches/{batch}",
    "endpoint:POST /v1/batches/{batch}/cancel",
)
def test_file_storage_path(plain: Server, other: Server) -> None:
    """Files are in the folder of the argument alone, which is made for the first one."""
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2], "max_tokens": 3}}
        for name in ("a", "b")
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines)
    for server, folder in ((plain, Path("files")), (other, Path("new", "uploads"))):
        stored = server.log.parent / folder
        assert not stored.exists()
        with server.client() as client:
            form = {"purpose": (None, "batch"), "file": ("../../in.jsonl", data)}
            file = client.post("/v1/files", files=form).raise_for_status().json()
            assert (stored / f"{file['id']}.data").read_text() == data
            body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = client.post("/v1/batches", json=body).raise_for_status().json()["id"]
            output = completed(client, batch)["output_file_id"]
            entries = [json.loads(line) for line in client.get(f"/v1/files/{output}/content").text.splitlines()]
        assert {entry["custom_id"] for entry in entries} == {"a", "b"}
        assert {entry["response"]["body"]["usage"]["completion_tokens"] for entry in entries} == {3}
        assert sorted(path.name for path in stored.iterdir()) == sorted(
            f"{name}{suffix}" for name in (file["id"], output) for suffix in (".data", ".json")
        )
        with server.client() as client:
            assert [entry["id"] for entry in client.get("/v1/batches").json()["data"]] == [batch]
            assert client.post(f"/v1/batches/{batch}/cancel").json()["error"]["code"] == "batch_ended"
            assert {entry["id"] for entry in client.get("/v1/files").json()["data"]} == {file["id"], output}
            assert client.get(f"/v1/files/{file['id']}").json() == file
            assert client.delete(f"/v1/files/{file['id']}").json()["deleted"]
        assert len(list(stored.iterdir())) == 2


@covers("enable_tokenizer_batch_encode=false", "enable_tokenizer_batch_encode=true")
def test_enable_tokenizer_batch_encode(plain: Server, other: Server) -> None:
    """The texts of one request need one call of the tokenizer instead of one each."""
    body = {"prompt": ["a b"] * 6}
    assert encoded_by(plain, **body) == (6, 6)
    assert encoded_by(other, **body) == (6, 1)


@covers("skip_server_warmup=true", "skip_server_warmup=false", "warmups")
def test_skip_server_warmup_and_warmups(plain: Server, other: Server, common: tuple[str, ...]) -> None:
    """What ran before the server was ready is in its log and in its metrics."""
    ran = [name in other.log_text() for name in ("warm-up generate", "warm-up chat", "warm-up long_prompt")]
    assert ran == [True] * 3
    assert "warm-up batch" in other.log_text()
    assert "warm-up" not in plain.log_text()
    assert other.metrics()["srv_generated_tokens_total"] >= 11 * 8
    status, text, _ = launch(*common, "--port", str(free_port()), "--warmups", "dance")
    assert (status, "chat, long_prompt, batch" in text) == (2, True)


@covers("enable_custom_logit_processor=false", "enable_custom_logit_processor=true")
def test_enable_custom_logit_processor(plain: Server, other: Server) -> None:
    """A request names a processor of another distribution; its code never comes with the request."""
    body = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    only = {"custom_logit_processor": "only", "custom_params": {"token": 7}}
    assert refused(plain, "/v1/completions", **body, **only)[0] == "custom_processors_disabled"
    assert _outputs(other, **body, **only) == [[7, 7, 7]]
    native = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "custom_params": {"token": 9}}}
    assert other.generate(**native, custom_logit_processor="only")["output_ids"] == [9, 9]
    assert refused(other, "/v1/completions", **body, custom_logit_processor="import os") == (
        "invalid_value",
        "custom_logit_processor",
    )
    wrong = {"custom_logit_processor": "only", "custom_params": {"token": -1}}
    assert refused(other, "/v1/completions", **body, **wrong) == ("invalid_value", "custom_params")
    assert refused(other, "/v1/completions", **body, custom_params={"token": 1})[1] == "custom_params"


@covers("trust_request_chat_template=false", "trust_request_chat_template=true")
def test_trust_request_chat_template(plain: Server, other: Server) -> None:
    source = "{% for one in messages %}a{{ one.content }}"
    body = {"messages": [{"role": "user", "content": "b"}], "chat_template": source}
    assert refused(plain, "/tokenize", **body) == ("templates_disabled", "chat_template")
    assert refused(other, "/tokenize", **body) == ("invalid_value", "chat_template")
    body["chat_template"] = source + "{% endfor %}"
    assert other.post("/tokenize", **body).json()["tokens"] == other.post("/tokenize", prompt="ab").json()["tokens"]


def test_a_processor_that_fails_ends_its_own_request_alone(other: Server) -> None:
    body = {"prompt": [1, 2], "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
    outputs: list[list[list[int]]] = []
    beside = threading.Thread(target=lambda: outputs.append(_outputs(other, **body)), daemon=True)
    beside.start()
    response = other.post("/v1/completions", **body, custom_logit_processor="broken")
    beside.join(60)
    assert response.json()["error"]["code"] == "non_finite_logits"
    assert [len(output) for output in outputs[0]] == [200]
    assert "this processor is broken" in other.log_text()


@covers("skip_tokenizer_init=false", "skip_tokenizer_init=true")
def test_skip_tokenizer_init(plain: Server, common: tuple[str, ...], letters_model: Path, tmp_path: Path) -> None:
    """Without a tokenizer, token ids come and go, and every field with text is refused by its name."""
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(letters_model / "config.json", folder)
    flags = (*common, "--model-path", str(folder), "--skip-tokenizer-init")
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}}
    with launched(tmp_path / "log", *flags, "--served-model-name", "letters") as server:
        answer, expected = server.generate(**body), plain.generate(**body)
        assert answer["output_ids"] == expected["output_ids"]
        assert ("text" in answer, "text" in expected) == (False, True)
        assert [len(output) for output in _outputs(server, prompt=[1], max_tokens=2, ignore_eos=True)] == [2]
        assert server.get("/health_generate").status_code == 200
        for field, more in (
            ("stop", {"stop": ["a"]}),
            ("bad_words", {"bad_words": ["a"]}),
        ):
            assert refused(server, "/v1/completions", prompt=[1], **more) == ("no_tokenizer", field)
        assert refused(server, "/v1/completions", prompt="a") == ("no_tokenizer", "prompt")
        assert refused(server, "/generate", text="a") == ("no_tokenizer", "text")
        assert refused(server, "/generate", **body, return_text_in_logprobs=True)[1] == "return_text_in_logprobs"
        assert refused(server, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])[1] == "messages"
        assert refused(server, "/tokenize", prompt="a")[0] == "no_tokenizer"
        assert refused(server, "/detokenize", tokens=[1])[0] == "no_tokenizer"
    status, text, _ = launch(*flags, "--tokenizer-worker-num", "2", "--port", str(free_port()))
    assert (status, "without a tokenizer, tokenizer_worker_num has no effect" in text) == (2, True)


@pytest.fixture(scope="module")
def gathering(common: tuple[str, ...], tuned_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Encodes the texts of several requests together, and ignores the sampling parameters of the model's files."""
    more = ("--dynamic-batch-tokenizer-batch-size", "4", "--dynamic-batch-tokenizer-batch-timeout", "0.5")
    model = ("--model-path", str(tuned_model), "--sampling-defaults", "openai")
    flags = (*common, *model, "--enable-dynamic-batch-tokenizer", *more)
    with launched(tmp_path_factory.mktemp("gathering") / "log", *flags) as server:
        yield server


def concurrently_encoded(server: Server, texts: list[str]) -> tuple[float, float, list[Any]]:
    """Texts and calls of the tokenizer for one request per text at the same time, and the responses."""
    before, answers = encoded(server), []
    clients = [
        threading.Thread(target=lambda text=text: answers.append(server.post("/tokenize", prompt=text)), daemon=True)
        for text in texts
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join(30)
    after = encoded(server)
    return after[0] - before[0], after[1] - before[1], answers


@covers(
    "enable_dynamic_batch_tokenizer=false",
    "enable_dynamic_batch_tokenizer=true",
    "dynamic_batch_tokenizer_batch_size=32",
    "dynamic_batch_tokenizer_batch_size=4",
    "dynamic_batch_tokenizer_batch_timeout=0.002",
    "dynamic_batch_tokenizer_batch_timeout=0.5",
)
def test_dynamic_batch_tokenizer(plain: Server, gathering: Server) -> None:
    """Concurrent requests share calls of at most four texts; a single one waits half a second for others."""
    texts, calls, answers = concurrently_encoded(gathering, ["a b"] * 8)
    assert (texts, {tuple(answer.json()["tokens"]) for answer in answers}) == (8, {(0, 1)})
    assert 2 <= calls <= 4
    assert concurrently_encoded(plain, ["a b"] * 8)[:2] == (8, 8)
    alone = [server.post("/tokenize", prompt="c").elapsed.total_seconds() for server in (plain, gathering)]
    assert alone[1] >= 0.5 > alone[0]

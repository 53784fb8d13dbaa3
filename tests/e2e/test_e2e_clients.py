"""Clients of other servers, as their users run them: benchmarks, an evaluation, three libraries.

They are installed in an environment of their own (`make clients`), and each sends a few requests to one server.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Server, served

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
ENVIRONMENT = ROOT / "build" / "clients"
SCRIPTS = HERE.parents[1] / "clients"
CLIENT_S = 240  # a client needs less than 15 s of processor time, most of it to import its modules
# They look for updates, prices and tokenizers on the network otherwise, some of them for half a minute.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
}
PROMPTS = ("a b c", "d e f", "g h i")
CHOICES = ("a b", "x y")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.proof(minutes=0.7),
    pytest.mark.xdist_group("clients"),
    pytest.mark.skipif(
        not (ENVIRONMENT / ".ready").exists() and not os.environ.get("CI"),
        reason="the clients are not in build/clients: run make clients",
    ),
]


@pytest.fixture(scope="module")
def letters(letters_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ("--model-path", str(letters_model), "--load-format", "dummy", "--max-total-tokens", "16384")
    with served(tmp_path_factory.mktemp("server") / "log", "--device", "cpu", *arguments) as server:
        yield server


def run_client(folder: Path, *command: str) -> str:
    """The standard output of a client that must succeed. `command`: a program of the environment, and arguments."""
    process = subprocess.run(
        [str(ENVIRONMENT / "bin" / command[0]), *command[1:]],
        cwd=folder,
        env={**os.environ, **OFFLINE, "HF_HOME": str(folder / "huggingface"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    assert process.returncode == 0, (process.stdout + process.stderr)[-4000:]
    return process.stdout


def run_script(folder: Path, name: str, server: Server) -> dict[str, Any]:
    printed = run_client(folder, "python", str(SCRIPTS / name), f"{server.base}/v1", server.model())
    printed_json: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return printed_json


def test_guidellm(letters: Server, letters_model: Path, tmp_path: Path) -> None:
    printed = run_client(
        tmp_path,
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={letters.base},model={letters.model()}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
        *("--tokenizer", f"kind=huggingface_auto,model={letters_model}"),
        *("--data", "kind=synthetic_text,prompt_tokens=8,output_tokens=6"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console-interactive"),
    )
    assert "generated 1 benchmark" in printed
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0)
    counted = benchmark["metrics"]["output_token_count"]["successful"]
    assert (counted["count"], counted["mean"]) == (3, 6.0)


def test_bench_serving_of_sglang(letters: Server, letters_model: Path, tmp_path: Path) -> None:
    (script,) = ENVIRONMENT.glob("lib/*/site-packages/sglang/bench_serving.py")
    printed = run_client(
        tmp_path,
        *("python", "-P", str(script), "--backend", "sglang", "--base-url", letters.base),
        *("--model", letters.model(), "--tokenizer", str(letters_model), "--dataset-name", "random-ids"),
        *("--num-prompts", "4", "--warmup-requests", "1", "--disable-tqdm", "--output-file", "results.jsonl"),
        *("--random-input-len", "8", "--random-output-len", "6", "--random-range-ratio", "1"),
    )
    rows = dict(line.split(":", 1) for line in printed.splitlines() if line.count(":") == 1)
    assert rows["Successful requests"].split() == ["4"]
    assert rows["Total generated tokens"].split() == ["24"]


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
metadata: {{version: 1}}
"""
CHOOSING = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
"""
CONTINUING = """\
output_type: generate_until
doc_to_target: "{{output}}"
generation_kwargs: {until: ["no such text"], max_gen_toks: 4, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def likelier(server: Server, prompt: str) -> int:
    """The choice with the higher log-probability after the prompt, by another endpoint."""
    start = len(prompt.split())
    body = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": start}
    sums = []
    for choice in CHOICES:
        scores = server.generate(text=f"{prompt} {choice}", **body)["meta_info"]["input_token_logprobs"]
        assert len(scores) == 2
        sums.append(sum(logprob for logprob, _, _ in scores))
    return sums.index(max(sums))


def test_lm_eval(letters: Server, letters_model: Path, tmp_path: Path) -> None:
    """Its log-likelihoods and its generated texts are those of the server: one answer of three is called wrong."""
    data = tmp_path / "data.jsonl"
    greedy = {"max_new_tokens": 4, "temperature": 0}
    rows = [
        {
            "text": prompt,
            "choices": CHOICES,
            "gold": likelier(letters, prompt) ^ (index == 0),
            "output": letters.generate(text=prompt, sampling_params=greedy)["text"] if index else "another text",
        }
        for index, prompt in enumerate(PROMPTS)
    ]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, rest in (("choosing", CHOOSING), ("continuing", CONTINUING)):
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)
    served_model = f"model={letters.model()},base_url={letters.base}/v1/completions"
    printed = run_client(
        tmp_path,
        *("lm_eval", "run", "--model", "local-completions", "--tasks", "choosing,continuing"),
        *("--model_args", f"{served_model},tokenizer={letters_model},num_concurrent=1,max_retries=1,max_length=256"),
        *("--include_path", str(tmp_path)),
    )
    values = {cells[1].strip(): cells[7].strip() for line in printed.splitlines() if len(cells := line.split("|")) > 8}
    assert values["choosing"] == values["continuing"] == "0.6667", printed


def test_langchain(letters: Server, tmp_path: Path) -> None:
    fields = run_script(tmp_path, "with_langchain.py", letters)
    assert len(fields["text"].split()) == 6
    assert (fields["tokens"], fields["finish"]) == (6, "length")
    assert fields["fingerprint"].startswith("fp_")
    assert (fields["streamed"], fields["streamed_tokens"]) == (fields["text"], [6])
    assert fields["scored"] == [6, 6]


def test_anthropic(letters: Server, tmp_path: Path) -> None:
    fields = run_script(tmp_path, "with_anthropic.py", letters)
    assert len(fields["text"].split()) == 6
    assert (fields["stop_reason"], fields["input"], fields["output"]) == ("max_tokens", 3, 6)
    assert (fields["streamed"], fields["streamed_output"], fields["beta"]) == (fields["text"], 6, fields["text"])
    assert fields["kinds"] == [
        *("message_start", "content_block_start", "content_block_delta", "text"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert (fields["counted"], fields["models"]) == (3, [letters.model()])
    assert "gpt-9 is not served" in fields["refused"]
    assert fields["request_id"].startswith("req_")


def test_litellm(letters: Server, tmp_path: Path) -> None:
    fields = run_script(tmp_path, "with_litellm.py", letters)
    assert len(fields["text"].split()) == 5
    assert (fields["tokens"], fields["streamed_tokens"]) == (5, [5])
    assert fields["streamed"] == fields["completed"] == fields["text"]

"""Encoders, cross-encoders and rerankers behind real servers: what they return equals transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_support import Server, served
from pooled_models import POSITIONS, pooled_model, tokenizer, write_modules
from torch import Tensor
from torch.nn.functional import normalize

from srv_matrix.pytest_plugin import covers

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LONG = "a b c d e f g h " * 6
ARGUMENTS = ("--device", "cpu", "--dtype", "float32", "--max-running-requests", "8")
TEMPLATE = {"prefix": "[CLS] ", "body": "{instruction} Q {query} D {document}", "suffix": " A", "instruction": "find"}


def reason(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def logits(model: Any, first: str, second: str | None = None) -> Tensor:
    encoded = tokenizer().encode(first, second)
    inputs = {"input_ids": torch.tensor([encoded.ids]), "token_type_ids": torch.tensor([encoded.type_ids])}
    with torch.no_grad():
        return model(**inputs).logits[0]


@covers(
    "model:BertForSequenceClassification/safetensors",
    "endpoint:POST /rerank",
    "endpoint:POST /v1/rerank",
    "endpoint:POST /v2/rerank",
    "endpoint:POST /score",
    "endpoint:POST /v1/score",
    platform="cpu",
)
def test_a_cross_encoder_reads_pairs_as_its_tokenizer_joins_them(tmp_path: Path) -> None:
    model = pooled_model("bert scorer", tmp_path)
    documents = ["b c", "z", LONG, "q r s t"]
    wanted = [float(torch.sigmoid(logits(model, "a b", document))) for document in documents]
    with served(tmp_path / "log", "--model-path", str(tmp_path), *ARGUMENTS) as server:
        for path in ("/score", "/v1/score"):
            data = server.post(path, text_1="a b", text_2=documents).json()["data"]
            assert [entry["score"] for entry in data] == pytest.approx(wanted, abs=1e-5)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            results = server.post(path, query="a b", documents=documents, top_n=2).json()["results"]
            best = sorted(range(4), key=lambda index: -wanted[index])[:2]
            assert [result["index"] for result in results] == best
            assert [result["relevance_score"] for result in results] == pytest.approx(
                [wanted[index] for index in best], abs=1e-5
            )
        check_limits(server, model)


def check_limits(server: Server, model: Any) -> None:
    """A pair that is too long is refused, or its longer text is cut; text is not generated."""
    long = "a " * POSITIONS
    refused = server.post("/score", text_1="b", text_2=long)
    assert reason(refused) == (400, "context_length_exceeded")
    cut = server.post("/score", text_1="b", text_2=long, truncate_prompt_tokens=-1).json()
    assert cut["usage"]["prompt_tokens"] == POSITIONS
    wanted = float(torch.sigmoid(logits(model, "b", "a " * (POSITIONS - 4))))
    assert cut["data"][0]["score"] == pytest.approx(wanted, abs=1e-5)
    assert reason(server.post("/v1/completions", prompt="a")) == (400, "no_generation")
    assert server.get("/health_generate").status_code == 200


@covers("endpoint:POST /classify", "endpoint:POST /v1/classify", platform="cpu")
def test_labels_of_texts(tmp_path: Path) -> None:
    names = {0: "bad", 1: "fair", 2: "good"}
    model = pooled_model(
        "bert classifier", tmp_path, id2label=names, label2id={name: index for index, name in names.items()}
    )
    texts = ["a b", LONG, "z"]
    with served(tmp_path / "log", "--model-path", str(tmp_path), *ARGUMENTS) as server:
        for path in ("/classify", "/v1/classify"):
            data = server.post(path, input=texts).json()["data"]
            for entry, text in zip(data, texts, strict=True):
                wanted = logits(model, text).softmax(-1)
                assert entry["probs"] == pytest.approx(wanted.tolist(), abs=1e-5)
                assert entry["label"] == names[int(wanted.argmax())]


@covers(
    "model:BertModel/safetensors",
    "pooling=cls",
    "pooling=max",
    "pooling=weightedmean",
    "pooling=mean_sqrt_len",
    platform="cpu",
)
def test_an_encoder_embeds_with_the_prompts_and_modules_of_its_files(tmp_path: Path) -> None:
    model = pooled_model("bert", tmp_path)
    write_modules(tmp_path, {"pooling_mode_cls_token": True}, ("Normalize", "2_Normalize", {}))
    more = {"prompts": {"query": "q : ", "passage": "p : "}, "default_prompt_name": "passage"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(more))

    def states(text: str) -> Tensor:
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokenizer().encode(text).ids])).last_hidden_state[0]

    with served(tmp_path / "log", "--model-path", str(tmp_path), *ARGUMENTS) as server:
        for name, prefix in ((None, "p : "), ("query", "q : ")):
            fields = {} if name is None else {"prompt_name": name}
            data = server.post("/v1/embeddings", input=["a b", LONG[:40]], **fields).json()["data"]
            for entry, text in zip(data, ("a b", LONG[:40]), strict=True):
                assert entry["embedding"] == pytest.approx(
                    normalize(states(prefix + text)[0], dim=0).tolist(), abs=1e-5
                )
    poolings = {
        "max": lambda rows: rows.max(0).values,
        "mean_sqrt_len": lambda rows: rows.sum(0) / math.sqrt(len(rows)),
    }
    poolings["weightedmean"] = lambda rows: torch.arange(1.0, len(rows) + 1) @ rows / sum(range(1, len(rows) + 1))
    for pooling, reference in poolings.items():
        arguments = ("--model-path", str(tmp_path), "--pooling", pooling, *ARGUMENTS)
        with served(tmp_path / "log", *arguments) as server:
            (item,) = server.post("/v1/embeddings", input="a b", normalize=False).json()["data"]
            assert item["embedding"] == pytest.approx(reference(states("p : a b")).tolist(), rel=1e-4, abs=1e-4)


@covers("score_template", platform="cpu")
def test_a_generator_is_asked_for_yes_or_no(tmp_path: Path) -> None:
    """As Qwen3-Reranker: the score is the softmax over the logits of both answers after the last token."""
    model = pooled_model("qwen3 generator", tmp_path)
    (tmp_path / "template.json").write_text(json.dumps(TEMPLATE))
    arguments = ("--model-path", str(tmp_path), *ARGUMENTS, "--max-total-tokens", "512")
    documents = ["b c", LONG]
    with served(tmp_path / "log", *arguments, "--score-template", str(tmp_path / "template.json")) as server:
        results = server.post("/rerank", query="x", documents=documents).json()["results"]
        scores = {result["index"]: result["relevance_score"] for result in results}
        for index, document in enumerate(documents):
            ids = tokenizer().encode(f"[CLS] find Q x D {document} A", add_special_tokens=False).ids
            with torch.no_grad():
                last = model(input_ids=torch.tensor([ids])).logits[0, -1]
            yes, no = (tokenizer().token_to_id(word) for word in ("yes", "no"))
            assert scores[index] == pytest.approx(float(last[[yes, no]].softmax(-1)[0]), abs=1e-5)
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    with served(tmp_path / "log", *arguments, "--is-embedding") as server:
        assert reason(server.post("/rerank", query="x", documents=documents, instruction="y")) == (400, "not_supported")
        assert server.post("/rerank", query="x", documents=documents).status_code == 200

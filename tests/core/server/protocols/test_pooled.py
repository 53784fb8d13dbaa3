"""`/rerank`, `/score` and `/classify` over the fake engine: formats, what reaches the engine, refusals."""

from __future__ import annotations

import math

import httpx
import pytest
from every import every
from server_support import CONTEXT, MODEL, serving

from srv.models.score_template import ScoreTemplate
from srv.server.protocols.pooled.scoring import activated
from srv.server.text.encoded_template import EncodedTemplate
from srv.testing.fake_engine import BOS, EOS, ByteTokenizer, FakeEngine
from srv.types import DenseLayer, PooledHead, PooledOutput, Pooling, PoolingParams, RequestSpec

pytestmark = pytest.mark.anyio
ONE_LABEL = PooledHead(labels=("LABEL_0",), activation="identity")
TWO_LABELS = PooledHead(labels=("bad", "good"), activation="softmax")
ASKED = ScoreTemplate("<", "{instruction}|{query}|{document}", ">", "find", yes="y", no="n")


def asked(answers: tuple[int, ...]) -> EncodedTemplate:
    return EncodedTemplate(ASKED, tuple(b"<"), tuple(b">"), answers)


def sent(engine: FakeEngine) -> list[RequestSpec]:
    return [message for message in engine.received if isinstance(message, RequestSpec)]


def outcome(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


@every("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ordered_by_the_logit_of_their_pair(path: str) -> None:
    async with serving(head=ONE_LABEL, pooling=Pooling.CLS, generates=False) as server:
        body = {"model": MODEL, "query": "ab", "documents": ["c", {"text": "defg"}, "hi"], "rid": "mine"}
        response = await server.post(path, **body)
        assert response.status_code == 200, response.text
        assert response.json() == {
            "id": "mine",
            "results": [
                {"index": 1, "document": {"text": "defg"}, "relevance_score": pytest.approx(0.07)},
                {"index": 2, "document": {"text": "hi"}, "relevance_score": pytest.approx(0.05)},
                {"index": 0, "document": {"text": "c"}, "relevance_score": pytest.approx(0.04)},
            ],
            "model": MODEL,
            "usage": {"prompt_tokens": 16, "total_tokens": 16, "prompt_tokens_details": {"cached_tokens": 0}},
        }
        assert sent(server.engine)[0].tokens == (*b"ab", EOS, *b"c")
        labels = PoolingParams(pooling=Pooling.CLS, output=PooledOutput.LABELS, types_from=3)
        assert {spec.params for spec in sent(server.engine)} == {labels}
        cut = (await server.post(path, **body, top_n=1, return_documents=False)).json()
        assert cut["results"] == [{"index": 1, "relevance_score": pytest.approx(0.07)}]


async def test_activations_follow_the_models_files_unless_refused() -> None:
    async with serving(head=PooledHead(labels=("x",)), pooling=Pooling.CLS) as server:
        scores = [
            (await server.post("/score", text_1="a", text_2="bc", **more)).json()["data"][0]["score"]
            for more in ({}, {"use_activation": False}, {"activation": False})
        ]
        assert scores == [pytest.approx(1 / (1 + math.exp(-0.04))), pytest.approx(0.04), pytest.approx(0.04)]
    assert activated([0.0, math.log(3)], "softmax") == pytest.approx([0.25, 0.75])
    assert activated([-800.0, 800.0], "sigmoid") == [0.0, 1.0]


async def test_one_text_is_scored_with_all_and_several_one_by_one() -> None:
    async with serving(head=ONE_LABEL, pooling=Pooling.CLS) as server:
        answer = (await server.post("/v1/score", text_1="a", text_2=["b", "cd"])).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx([0.03, 0.04])
        assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "score"), (1, "score")]
        pairs = (await server.post("/v1/score", text_1=["a", "bb"], text_2=["c", "d"])).json()
        assert [item["score"] for item in pairs["data"]] == pytest.approx([0.03, 0.04])
        renamed = await server.post("/v1/score", queries="a", documents="b")
        assert "it is called text_1 here" in renamed.json()["error"]["message"]
        refused = await server.post("/v1/score", text_1=["a", "b"], text_2=["c", "d", "e"])
        assert outcome(refused) == (400, "invalid_value", "text_1")


async def test_an_embedding_model_compares_vectors_and_embeds_each_text_once() -> None:
    async with serving(pooling=Pooling.MEAN) as server:
        answer = (await server.post("/score", text_1="a", text_2=["a", "b"])).json()
        assert answer["data"][0]["score"] == pytest.approx(1.0)
        assert answer["data"][1]["score"] == pytest.approx(1.0, abs=0.01)
        assert [bytes(spec.tokens) for spec in sent(server.engine)] == [b"a", b"b"]
        assert answer["usage"]["prompt_tokens"] == 2


async def test_a_template_asks_for_yes_or_no() -> None:
    tokens = (ord("y"), ord("n"))
    async with serving(score_template=asked(tokens), pooling=Pooling.LAST) as server:
        answer = (await server.post("/rerank", query="q{document}", documents=["d"])).json()
        (spec,) = sent(server.engine)
        assert bytes(spec.tokens) == b"<find|q{document}|d>"  # what a query holds is not filled in
        assert spec.params == PoolingParams(pooling=Pooling.LAST, output=PooledOutput.TOKENS, tokens=tokens)
        assert answer["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-(tokens[0] - tokens[1]))))
        await server.post("/rerank", query="q", documents=["d"], instruction="judge")
        assert bytes(sent(server.engine)[1].tokens) == b"<judge|q|d>"


async def test_the_text_in_a_template_loses_its_end() -> None:
    body = {"query": "q", "documents": ["document", "d"]}
    async with serving(score_template=asked((1, 2)), pooling=Pooling.LAST) as server:
        response = await server.post("/rerank", **body, truncate_prompt_tokens=12)
        assert response.status_code == 200, response.text
        assert {bytes(spec.tokens) for spec in sent(server.engine)} == {b"<find|q|doc>", b"<find|q|d>"}
        refused = await server.post("/rerank", **body, truncate_prompt_tokens=2)
        assert outcome(refused) == (400, "invalid_value", "truncate_prompt_tokens")
        long = await server.post("/score", text_1="q", text_2="d" * 300)
        assert outcome(long) == (400, "context_length_exceeded", "text_2[0]")
        fitting = await server.post("/score", text_1="q", text_2="d" * 300, truncate_prompt_tokens=-1)
        assert fitting.json()["usage"]["prompt_tokens"] == CONTEXT
        assert bytes(sent(server.engine)[-1].tokens[-3:]) == b"dd>"


async def test_prompts_that_pooling_would_have_to_leave_out_are_refused() -> None:
    head = PooledHead(prompts=(("q", "find: "), ("none", "")), default_prompt="q", prompt_pooled=False)
    async with serving(head=head, pooling=Pooling.MEAN) as server:
        refused = await server.post("/score", text_1="a", text_2="b")
        assert outcome(refused) == (400, "not_supported", None)
        assert "default prompt q" in refused.json()["error"]["message"]
        assert outcome(await server.post("/v1/embeddings", input="a")) == (400, "not_supported", None)
        named = await server.post("/v1/embeddings", input="a", prompt_name="q")
        assert outcome(named) == (400, "not_supported", "prompt_name")
        assert (await server.post("/v1/embeddings", input="a", prompt_name="none")).status_code == 200
        assert (await server.post("/v1/embeddings", input=[97])).status_code == 200


async def test_cosines_have_no_activation_to_leave_out() -> None:
    async with serving(pooling=Pooling.MEAN) as server:
        refused = await server.post("/score", text_1="a", text_2="b", use_activation=False)
        assert outcome(refused) == (400, "not_supported", "use_activation")


async def test_texts_of_models_that_do_not_continue_them_lose_their_end() -> None:
    """As in transformers, whose tokenizers cut the text between the special tokens."""
    async with serving(text=ByteTokenizer(adds_bos=True), pooling=Pooling.CLS, generates=False) as server:
        for text_input, keep, kept in (("abcd", 3, (BOS, *b"ab")), ([97, 98, 99, 100], 3, (*b"abc",))):
            await server.post("/v1/embeddings", input=text_input, truncate_prompt_tokens=keep)
            assert sent(server.engine)[-1].tokens == kept
        refused = await server.post("/v1/embeddings", input="abcd", truncate_prompt_tokens=1)
        assert outcome(refused) == (400, "invalid_value", "truncate_prompt_tokens")


@every("path", ["/classify", "/v1/classify"])
async def test_the_most_likely_label_of_each_text(path: str) -> None:
    async with serving(head=TWO_LABELS, pooling=Pooling.CLS, generates=False) as server:
        answer = (await server.post(path, input=["ab", "c"])).json()
        likely = math.exp(1) / (1 + math.exp(1))
        expected = {"label": "good", "probs": pytest.approx([1 - likely, likely]), "num_classes": 2}
        assert answer["data"] == [{"index": 0, **expected}, {"index": 1, **expected}]
        assert (answer["object"], answer["usage"]["total_tokens"]) == ("list", 3)
        raw = (await server.post(path, input=[97, 98], use_activation=False)).json()
        assert raw["data"][0]["probs"] == pytest.approx([0.02, 1.02])
        assert bytes(sent(server.engine)[2].tokens) == b"ab"


@every(
    ("query", "items", "item_first", "prompts"),
    [
        ("q", "ab", None, [b"qab"]),
        ("q", ["ab", "c"], True, [b"abq", b"cq"]),
        ([113], [[97, 98], [99]], False, [b"qab", b"qc"]),
    ],
)
async def test_scores_of_labels_in_sglangs_forms(
    query: object, items: object, item_first: bool | None, prompts: list[bytes]
) -> None:
    """The fake engine says that a token of id n has the log-probability -n / 1000."""
    async with serving() as server:
        body = {"query": query, "items": items, "label_token_ids": [100, 200], "item_first": item_first}
        answer = (await server.post("/v1/score", **body, rid="mine")).json()
        expected = [math.exp(-0.1), math.exp(-0.2)]
        assert answer["scores"] == [pytest.approx(expected)] * len(prompts)
        assert (answer["object"], answer["id"], answer["model"]) == ("scoring", "mine", MODEL)
        assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert [bytes(spec.tokens) for spec in sent(server.engine)] == prompts
        softmax = (await server.post("/score", **body, apply_softmax=True)).json()["scores"][0]
        assert softmax == pytest.approx([value / sum(expected) for value in expected])


async def test_items_without_labels_are_scored_like_pairs() -> None:
    async with serving(head=ONE_LABEL, pooling=Pooling.CLS, generates=False) as server:
        pairs = (await server.post("/score", text_1="q", text_2=["ab", "c"])).json()["data"]
        answer = (await server.post("/score", query="q", items=["ab", "c"])).json()
        assert answer["scores"] == [[pair["score"]] for pair in pairs]


@every(
    ("body", "param"),
    [
        ({"query": "q"}, "items"),
        ({"items": ["a"]}, "query"),
        ({"query": "q", "items": [[97]], "label_token_ids": [1]}, "items"),
        ({"query": ["q", "r"], "items": "a", "label_token_ids": [1]}, "query"),
        ({"query": [97], "items": [[97]]}, "query"),
        ({"query": "q", "items": "a", "label_token_ids": [10**6]}, "label_token_ids"),
        ({"query": "q", "items": "a", "label_token_ids": [1], "instruction": "b"}, "instruction"),
        ({"query": "q", "items": "a", "item_first": True}, "item_first"),
        ({"query": "q", "items": "a", "text_1": "b", "text_2": "c"}, "query"),
        ({"text_1": "a", "text_2": "b", "label_token_ids": [1]}, "label_token_ids"),
        ({"text_2": "b"}, "text_1"),
    ],
)
async def test_what_is_wrong_with_a_score_is_named(body: dict[str, object], param: str) -> None:
    async with serving() as server:
        refused = await server.post("/score", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert not server.engine.received


@every(
    ("path", "body", "head", "code"),
    [
        ("/classify", {"input": "a"}, PooledHead(), "not_a_classifier"),
        ("/rerank", {"query": "a", "documents": ["b"]}, TWO_LABELS, "not_a_scorer"),
        ("/v1/embeddings", {"input": "a"}, ONE_LABEL, "no_embeddings"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, PooledHead(), "not_supported"),
        ("/rerank", {"query": "a", "documents": []}, ONE_LABEL, "invalid_value"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, ONE_LABEL, "invalid_value"),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}, ONE_LABEL, "not_implemented"),
        ("/score", {"text_1": "a", "text_2": []}, ONE_LABEL, "invalid_value"),
        ("/score", {"text_1": "a", "text_2": 3}, ONE_LABEL, "invalid_type"),
        ("/score", {"text_1": "a", "text_2": "b" * 4096}, ONE_LABEL, "context_length_exceeded"),
        ("/rerank", {"query": "a", "documents": ["b"], "model": "other"}, ONE_LABEL, "model_not_found"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, PooledHead(), "invalid_value"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, PooledHead(dimensions=(2, 4)), "invalid_value"),
        (
            "/v1/embeddings",
            {"input": "a", "dimensions": 3},
            PooledHead(dense=(DenseLayer("2_Dense", 4, 2, True, "tanh"),)),
            "invalid_value",
        ),
    ],
)
async def test_what_a_model_cannot_is_refused(path: str, body: dict[str, object], head: PooledHead, code: str) -> None:
    async with serving(head=head, pooling=Pooling.CLS) as server:
        refused = await server.post(path, **body)
        assert refused.status_code in (400, 404), refused.text
        assert refused.json()["error"]["code"] == code
        assert not server.engine.received


async def test_nothing_is_pooled_unless_the_server_was_started_for_it() -> None:
    async with serving(pooling=None) as server:
        for path, body in (
            ("/rerank", {"query": "a", "documents": ["b"]}),
            ("/score", {"text_1": "a", "text_2": "b"}),
            ("/classify", {"input": "a"}),
        ):
            assert outcome(await server.post(path, **body)) == (400, "embeddings_disabled", None)


async def test_a_decoder_without_an_output_layer_says_why_it_generates_no_text() -> None:
    async with serving(generates=False, headless=True, pooling=Pooling.LAST) as server:
        refused = await server.post("/v1/completions", prompt="a")
        assert outcome(refused)[:2] == (400, "no_generation")
        assert "generates no text, because its weights have no output layer" in refused.json()["error"]["message"]


async def test_a_model_that_generates_no_text_says_so_and_is_healthy() -> None:
    async with serving(generates=False, pooling=Pooling.CLS) as server:
        refused = await server.post("/v1/completions", prompt="a")
        assert outcome(refused)[:2] == (400, "no_generation")
        assert "/v1/embeddings" in refused.json()["error"]["message"]
        assert "output layer" not in refused.json()["error"]["message"]
        assert (await server.http.get("/health_generate")).status_code == 200
        info = (await server.http.get("/get_model_info")).json()
        assert (info["generates"], info["labels"]) == (False, [])


@every(
    ("fields", "tokens"),
    [
        ({}, b"doc: a"),
        ({"prompt_name": "query"}, b"find: a"),
        ({"prompt_name": "query", "truncate_prompt_tokens": 3}, b"fin"),
    ],
)
async def test_prompts_of_the_models_files_precede_texts(fields: dict[str, object], tokens: bytes) -> None:
    head = PooledHead(prompts=(("query", "find: "), ("document", "doc: ")), default_prompt="document")
    async with serving(head=head, pooling=Pooling.LAST, generates=False) as server:
        await server.post("/v1/embeddings", input="a", **fields)
        assert bytes(sent(server.engine)[0].tokens) == tokens
        await server.post("/v1/embeddings", input=[97])
        assert bytes(sent(server.engine)[1].tokens) == b"a"
        refused = await server.post("/v1/embeddings", input=[97], prompt_name="query")
        assert outcome(refused) == (400, "invalid_value", "prompt_name")
